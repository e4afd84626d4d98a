// Facts about native/core, without Node: `make -C native/test run`, under the address and
// undefined-behaviour sanitizers. Arguments: parts of names; only facts that hold one of them run.
#include <array>

#include "check.hpp"

namespace varve::test {

std::uint64_t Seed() {
  const char* text = std::getenv("SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 20260801;
}

namespace {

bool Wanted(const char* name, int argc, char** argv) {
  if (argc < 2) return true;
  for (int i = 1; i < argc; ++i) {
    if (std::strstr(name, argv[i]) != nullptr) return true;
  }
  return false;
}

}  // namespace
}  // namespace varve::test

int main(int argc, char** argv) {
  using namespace varve::test;
  const std::array files{BitmapFacts(),  ReadFacts(),   FileFacts(), ScanFacts(),
                         ProcessFacts(), ThreadFacts(), LayerFacts()};
  std::printf("seed %llu\n", static_cast<unsigned long long>(Seed()));
  int count = 0;
  for (const auto facts : files) {
    for (const Fact& fact : facts) {
      if (!Wanted(fact.name, argc, argv)) continue;
      std::printf("- %s\n", fact.name);
      std::fflush(stdout);
      fact.body();
      count += 1;
    }
  }
  std::printf("%d facts hold\n", count);
  return count == 0 ? 1 : 0;
}
