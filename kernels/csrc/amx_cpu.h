// Tiles of AMX: registers of up to 16 rows of 64 bytes. Include only from sources of the level amx_bf16.
//
// A product of tiles adds to 16 x 16 sums what 16 x 32 values make with 32 x 16 others, these as 16 rows of pairs. The
// hardware adds up even and odd products of the 32 apart, then both to the sum: bits of a row depend on no other row.
#pragma once

#include "simd.h"

namespace chunkserve::CHUNKSERVE_ISA {
namespace {

constexpr int kAmxRows = 16;
constexpr int kAmxPairs = 16;  // of bf16, in a row

// Which register is which, here: sums 0 to 3, the left operands 4 and 5, the right ones 6 and 7.
struct alignas(64) AmxConfig {
  std::uint8_t palette = 1;
  std::uint8_t start_row = 0;
  std::uint8_t reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {};

  // Sums and left operands of `first` rows in 0, 1 and 4, of `second` rows in 2, 3 and 5.
  AmxConfig(int first, int second) {
    rows[0] = rows[1] = rows[4] = static_cast<std::uint8_t>(first);
    rows[2] = rows[3] = rows[5] = static_cast<std::uint8_t>(second);
    rows[6] = rows[7] = kAmxPairs;
  }
};

// The registers of this thread, given back in the end: what holds tiles is slower to switch from.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  ~AmxTiles() {
    if (first_) _tile_release();
  }

  CHUNKSERVE_INLINE void configure(int first, int second) {
    if (first == first_ && second == second_) return;
    const AmxConfig config(first, second);
    _tile_loadconfig(&config);
    first_ = first;
    second_ = second;
  }

 private:
  int first_ = 0, second_ = 0;
};

}  // namespace
}  // namespace chunkserve::CHUNKSERVE_ISA
