// Makes memory resident before it is needed, in huge pages where the kernel gives them.
#pragma once

#include <cstddef>
#include <span>

namespace varve {

// Asks for huge pages over the whole pages inside `memory`. A refusal is not an error.
void AdviseHugePages(std::span<std::byte> memory) noexcept;

// Makes every page of `memory` present and writable. Keeps the contents.
void TouchPages(std::span<std::byte> memory) noexcept;

}  // namespace varve
