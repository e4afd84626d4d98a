#include "supervisor/paused_set.hpp"

#include <algorithm>
#include <charconv>

namespace varve::supervisor {
namespace {

constexpr std::size_t kLineBytesMax = 4096;

// Takes the decimal number that `text` starts with, and the space after it.
template <typename Number>
bool TakeNumber(std::string_view& text, Number& out) {
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), out);
  if (parsed.ec != std::errc{}) return false;
  text.remove_prefix(static_cast<std::size_t>(parsed.ptr - text.data()));
  if (text.empty()) return true;
  if (text.front() != ' ') return false;
  text.remove_prefix(1);
  return true;
}

bool TakeWord(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

}  // namespace

bool PausedSet::Feed(std::string_view bytes) {
  bool good = true;
  while (!bytes.empty()) {
    const std::size_t end = bytes.find('\n');
    partial_.append(bytes.substr(0, end));
    if (end == std::string_view::npos) break;
    good = TakeLine(partial_) && good;
    partial_.clear();
    bytes.remove_prefix(end + 1);
  }
  if (partial_.size() > kLineBytesMax) {
    partial_.clear();
    return false;
  }
  return good;
}

bool PausedSet::TakeLine(std::string_view line) {
  PausedVm vm{};
  const bool paused = TakeWord(line, "paused ");
  if (!paused && !TakeWord(line, "resumed ")) return false;
  if (!TakeNumber(line, vm.key)) return false;
  if (paused) {
    if (!TakeNumber(line, vm.pid) || !TakeNumber(line, vm.start_ticks)) return false;
    if (line.empty() || vm.pid <= 0) return false;
  }
  std::erase_if(vms_, [&](const PausedVm& known) { return known.key == vm.key; });
  if (paused) {
    vm.socket_path = std::string(line);
    vms_.push_back(std::move(vm));
  }
  return true;
}

}  // namespace varve::supervisor
