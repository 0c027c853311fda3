// The matrix products of one warp of tpp_segment, s = q k^T and o += p v, for each dtype. tpp.cu includes tpp_device.cuh,
// or its host version, before this.
#pragma once

namespace tpp {

constexpr float kLog2e = 1.4426950408889634f;
constexpr int kWarpRows = 16;
constexpr int kLanes = 32;

// What the two rows of a thread need; thread 4 g + t of a warp holds rows g and g + 8 of its tile.
struct Row {
  bool valid;
  int token;
  int head;
  int pos;
  float slope_log2;
};

__device__ inline float value_of(float x) { return x; }
template <class T>
__device__ inline float value_of(T x) {
  return to_float(T{}, x.bits);
}

// e4m3 numbers, exactly; compute capability 8.0 has no instruction for it. Its exponent in the place of a float's is the
// value divided by 2^120, denormals included.
__device__ inline float e4m3_to_float(u32 byte) {
  return float_of((byte & 0x80u) << 24 | (byte & 0x7fu) << 20) * 0x1p120f;
}

// To the nearest e4m3 number, to even on ties; what is larger than 448 becomes 448.
__device__ inline u32 float_to_e4m3(float x) {
  const float size = fminf(fabsf(x), 448.0f);
  // Below 2^-6 numbers are multiples of 2^-9; adding 1.5 * 2^23 leaves the nearest integer in the low bits.
  const u32 small = bits_of(size * 512.0f + 12582912.0f) & 0xfu;
  const u32 wide = bits_of(size);
  const u32 large = ((wide + 0x7ffffu + (wide >> 20 & 1u)) >> 20) - 960u;
  return (size < 0.015625f ? small : large) | (bits_of(x) >> 24 & 0x80u);
}

// The scale of a chunk whose first token has this largest value: LayerKV in dispatch.py.
__device__ inline float first_token_scale(float top) {
  const int exponent = top == 0.0f ? 127 : static_cast<int>(bits_of(top) >> 23);
  return float_of(static_cast<u32>(min(max(exponent - 1, 27), 227)) << 23);
}

// By tensor cores, for 16-bit values.
template <class T, int D, int kKeys>
struct Products {
  static constexpr int kStride = D + 8;  // elements; an odd number of 16-byte units: no bank conflicts
  // Registers hold the queries up to here; at larger head dims all of them would spill.
  static constexpr int kHeld = D <= 192 ? D : 128;
  static constexpr int kQueryStride = D - kHeld + 8;
  static constexpr int kQueryBytes = kHeld == D ? 0 : kWarpRows * kQueryStride * 2;  // shared memory per warp
  u32 q[kHeld / 16][4];
  const T* q_shared;  // [16, kQueryStride]: columns from kHeld on

  __device__ void load_q(const T* base, i64 token_stride, i64 head_stride, const Row (&rows)[2], unsigned char* shared,
                         int lane) {
    q_shared = reinterpret_cast<const T*>(shared);
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Row& row = rows[i & 1];
        const int column = k * 16 + (i >> 1) * 8 + (lane & 3) * 2;
        const i64 at = row.token * token_stride + row.head * head_stride + column;
        const u32 pair = row.valid ? *reinterpret_cast<const u32*>(base + at) : 0u;
        if (k < kHeld / 16) {
          q[k][i] = pair;
        } else {
          const int r = (lane >> 2) + (i & 1) * 8;
          *reinterpret_cast<u32*>(shared + (r * kQueryStride + column - kHeld) * 2) = pair;
        }
      }
    }
    if (kHeld < D) team_sync(0, 1);
  }

  // s[n]: keys 8 n .. 8 n + 7 as an accumulator of mma.
  __device__ void logits(float (&s)[kKeys / 8][4], const T* k_tile, int lane) const {
    // Lanes of matrices 0 and 1 address keys 0-7, of 2 and 3 keys 8-15; odd matrices hold the upper 8 columns.
    const T* base = k_tile + ((lane & 7) + (lane >> 4) * 8) * kStride + ((lane >> 3) & 1) * 8;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      u32 a[4];
      if (k < kHeld / 16) {
        for (int i = 0; i < 4; ++i) a[i] = q[k][i];
      } else {
        load_matrix4(a, q_shared + (lane & 15) * kQueryStride + (lane >> 4) * 8 + k * 16 - kHeld);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        u32 b[4];
        load_matrix4(b, base + n * 16 * kStride + k * 16);
        mma(T{}, s[2 * n], a, b[0], b[1]);
        mma(T{}, s[2 * n + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ void add_values(float (&o)[D / 8][4], const float (&s)[kKeys / 8][4], const T* v_tile, unsigned char*,
                             int lane) const {
    // Lanes of matrices 0 and 2 address keys 0-7, of 1 and 3 keys 8-15; matrices 2 and 3 hold the upper 8 columns.
    const T* base = v_tile + (lane & 15) * kStride + (lane >> 4) * 8;
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const u32 a[4] = {pack2(T{}, s[2 * n][0], s[2 * n][1]), pack2(T{}, s[2 * n][2], s[2 * n][3]),
                        pack2(T{}, s[2 * n + 1][0], s[2 * n + 1][1]), pack2(T{}, s[2 * n + 1][2], s[2 * n + 1][3])};
#pragma unroll
      for (int d = 0; d < D / 16; ++d) {
        u32 b[4];
        load_matrix4_transposed(b, base + n * 16 * kStride + d * 16);
        mma(T{}, o[2 * d], a, b[0], b[1]);
        mma(T{}, o[2 * d + 1], a, b[2], b[3]);
      }
    }
  }

  __device__ static void store2(T* at, float a, float b) { *reinterpret_cast<u32*>(at) = pack2(T{}, a, b); }
};

struct alignas(16) Float4 {
  float x[4];
};

// fp32 by multiply-add, in the same distribution of s and o over the lanes.
template <int D, int kKeys>
struct Products<float, D, kKeys> {
  static constexpr int kStride = D + 4;
  static constexpr int kWeightStride = kKeys + 4;
  static constexpr int kQueryBytes = kWarpRows * (kStride + kWeightStride) * 4;
  const float* q;  // [16, kStride] in shared memory

  __device__ void load_q(const float* base, i64 token_stride, i64 head_stride, const Row (&rows)[2],
                         unsigned char* shared, int lane) {
    float* tile = reinterpret_cast<float*>(shared);
    q = tile;
    for (int r = 0; r < 2; ++r) {
      for (int d = lane & 3; d < D; d += 4) {
        const i64 at = rows[r].token * token_stride + rows[r].head * head_stride + d;
        tile[((lane >> 2) + 8 * r) * kStride + d] = rows[r].valid ? base[at] : 0.0f;
      }
    }
  }

  __device__ void logits(float (&s)[kKeys / 8][4], const float* k_tile, int lane) const {
    const float* rows = q + (lane >> 2) * kStride;
    const float* keys = k_tile + (lane & 3) * 2 * kStride;
#pragma unroll 2
    for (int d = 0; d < D; d += 4) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Float4 a = *reinterpret_cast<const Float4*>(rows + (i >> 1) * 8 * kStride + d);
          const Float4 b = *reinterpret_cast<const Float4*>(keys + (n * 8 + (i & 1)) * kStride + d);
#pragma unroll
          for (int e = 0; e < 4; ++e) s[n][i] += a.x[e] * b.x[e];
        }
      }
    }
  }

  __device__ void add_values(float (&o)[D / 8][4], const float (&s)[kKeys / 8][4], const float* v_tile,
                             unsigned char* shared, int lane) const {
    float* weights = reinterpret_cast<float*>(shared) + kWarpRows * kStride;  // [16, kWeightStride]
    for (int n = 0; n < kKeys / 8; ++n) {
      for (int i = 0; i < 4; ++i) {
        weights[((lane >> 2) + (i >> 1) * 8) * kWeightStride + n * 8 + (lane & 3) * 2 + (i & 1)] = s[n][i];
      }
    }
    team_sync(0, 1);
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) {
      const float a[2] = {weights[(lane >> 2) * kWeightStride + key], weights[((lane >> 2) + 8) * kWeightStride + key]};
      const float* b = v_tile + key * kStride + (lane & 3) * 2;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[n][i] += a[i >> 1] * b[n * 8 + (i & 1)];
      }
    }
    team_sync(0, 1);
  }

  __device__ static void store2(float* at, float a, float b) {
    at[0] = a;
    at[1] = b;
  }
};

}  // namespace tpp
