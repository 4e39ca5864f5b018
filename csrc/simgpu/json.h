// Just enough JSON to write the control API's answers.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

namespace simgpu {

inline std::string quoted(std::string_view text) {
  std::string made = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') {
      made += '\\';
      made += letter;
    } else if (static_cast<unsigned char>(letter) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(letter));
      made += code;
    } else {
      made += letter;
    }
  }
  return made + '"';
}

// Items of an object or a list, separated by commas.
class Items {
 public:
  Items& add(std::string_view item) {
    if (!text_.empty()) text_ += ", ";
    text_ += item;
    return *this;
  }
  Items& add(std::string_view key, std::string_view value) {
    return add(quoted(key) + ": " + std::string(value));
  }
  [[nodiscard]] std::string object() const { return "{" + text_ + "}"; }
  [[nodiscard]] std::string list() const { return "[" + text_ + "]"; }

 private:
  std::string text_;
};

// Hands `text` out as the control API promises; returns the size that it needs.
inline std::size_t hand_out(const std::string& text, char* out, std::size_t size) {
  if (out != nullptr && size > 0) {
    const std::size_t copied = std::min(text.size(), size - 1);
    std::memcpy(out, text.data(), copied);
    out[copied] = '\0';
  }
  return text.size() + 1;
}

}  // namespace simgpu
