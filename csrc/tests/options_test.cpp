#include "core/options.h"

#include <gtest/gtest.h>

#include <set>

#include "core/error.h"
#include "test_support.h"

namespace trae_mem::test {
namespace {

constexpr const char* kVariable = "TRAE_MEM_READER_THREADS";

TEST(OptionsTest, WithoutAVariableTheTablesDefaultHolds) {
  const ScopedVariable unset(kVariable, nullptr);
  EXPECT_EQ(option_number("reader_threads"), 2U);
  EXPECT_EQ(option_text("reader_threads"), "2");
}

TEST(OptionsTest, TheVariableWins) {
  const ScopedVariable set(kVariable, "17");
  EXPECT_EQ(option_number("reader_threads"), 17U);
  EXPECT_EQ(option_text("reader_threads"), "17");
}

TEST(OptionsTest, TheVariableIsReadAtEachCall) {
  const ScopedVariable first(kVariable, "3");
  EXPECT_EQ(option_number("reader_threads"), 3U);
  const ScopedVariable second(kVariable, "4");
  EXPECT_EQ(option_number("reader_threads"), 4U);
}

TEST(OptionsTest, WhatIsNotAWholeNumberIsRefusedWithTheVariablesName) {
  for (const char* text :
       {"", "two", "3x", " 3", "3 ", "-1", "+1", "1.5", "0x10", "99999999999999999999999"}) {
    const ScopedVariable set(kVariable, text);
    const std::string message =
        message_of<InvalidArgument>([] { static_cast<void>(option_number("reader_threads")); });
    EXPECT_NE(message.find(std::string(kVariable) + "='" + text + "'"), std::string::npos)
        << message;
  }
}

TEST(OptionsTest, ANumberBelowTheMinimumIsRefusedWithTheMinimum) {
  const ScopedVariable set(kVariable, "0");
  EXPECT_EQ(option_number("reader_threads"), 0U);
  const std::string message =
      message_of<InvalidArgument>([] { static_cast<void>(option_number("reader_threads", 1)); });
  EXPECT_NE(message.find("at least 1"), std::string::npos) << message;
}

TEST(OptionsTest, TheLargestNumberIsANumber) {
  const ScopedVariable set(kVariable, "18446744073709551615");
  EXPECT_EQ(option_number("reader_threads"), ~std::uint64_t{0});
}

TEST(OptionsTest, AnUnknownNameIsRefused) {
  EXPECT_THROW(static_cast<void>(option_number("reader_thread")), InvalidArgument);
  EXPECT_THROW(static_cast<void>(option_text("")), InvalidArgument);
}

TEST(OptionsTest, NamesAndVariablesOfTheTableAreDistinctAndComplete) {
  std::set<std::string> names;
  std::set<std::string> variables;
  for (const OptionDescription& option : kOptions) {
    names.insert(option.name);
    variables.insert(option.environment);
    EXPECT_TRUE(std::string(option.environment).starts_with("TRAE_MEM_")) << option.environment;
    EXPECT_FALSE(std::string(option.meaning).empty()) << option.name;
    const ScopedVariable unset(option.environment, nullptr);
    EXPECT_EQ(option_text(option.name), option.default_value);
  }
  EXPECT_EQ(names.size(), kOptions.size());
  EXPECT_EQ(variables.size(), kOptions.size());
}

}  // namespace
}  // namespace trae_mem::test
