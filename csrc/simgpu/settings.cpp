#include "settings.h"

#include "configuration.h"
#include "process.h"

namespace simgpu {

Settings::Settings()
    : seed(configuration().seed),
      delay_us(configuration().delay_us),
      poison(configuration().poison),
      link(configuration().link) {}

Settings& settings() {
  static Settings& made = immortal<Settings>();
  return made;
}

}  // namespace simgpu
