// The instructions of AMX and AVX-512 BF16 that the thin products need, one function each.
//
// They are written as inline assembly: the code around them then needs no compiler switch that would let such instructions
// appear elsewhere, and the memory clobber keeps stores that fill an operand before the load (GCC 12's own intrinsics
// do not say so). Callers ask `tiles_missing` or `dots_missing` first.
//
// A build with SUREFOOT_EMULATED replaces them by plain loops with the semantics of Intel's manual, for tests on any CPU.
// Nothing but a test asks for that build, and it registers its operations under a name of its own.

#pragma once

#include "vectors.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>

#if defined(SUREFOOT_EMULATED)
#define SUREFOOT_TILES 1
#elif defined(__AVX512F__) && defined(__linux__) && (__GNUC__ >= 11 || __clang_major__ >= 12)
#define SUREFOOT_TILES 1
#include <cerrno>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Palette 1: eight tiles of up to 16 rows of 64 bytes. All are used whole; missing rows are padding in the operands.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

#if SUREFOOT_TILES && !defined(SUREFOOT_EMULATED)

struct Cpuid {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  Cpuid(uint32_t leaf, uint32_t subleaf) { __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx); }
};
// Whether the operating system saves these parts of the registers' state.
bool state_enabled(uint32_t bits) {
  if (!(Cpuid(1, 0).ecx >> 27 & 1)) return false;
  uint32_t low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & bits) == bits;
}

// Why AVX-512 BF16 cannot be used here; empty if it can.
std::string dots_missing() {
  if (!(Cpuid(7, 0).ebx >> 16 & 1 && Cpuid(7, 1).eax >> 5 & 1)) return "the CPU has no avx512_bf16";
  return state_enabled(0xe6) ? "" : "the operating system does not enable AVX-512";
}

// Why AMX BF16 cannot be used here; empty if it can. Linux grants the large tile state to a process that asks for it.
std::string ask_for_tiles() {
  const uint32_t features = Cpuid(7, 0).edx;
  if (!(features >> 22 & 1 && features >> 24 & 1)) return "the CPU has no amx_tile and amx_bf16";
  if (!state_enabled(3 << 17)) return "the operating system does not enable AMX";
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA))
    return std::string("the operating system refuses AMX to this process: ") + std::strerror(errno);
  return dots_missing();  // every CPU with AMX has it; int8 weights are unpacked with it
}

inline void configure_tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
inline void load_tile(const void* from, int64_t row_stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_stride), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* to, int64_t row_stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_stride), "i"(T) : "memory");
}
// Tile C += A B: C[m][n] gains the products of the pairs A[m][2k, 2k+1] and B[k][2n, 2n+1], k = 0..15.
template <int C, int A, int B>
inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// sum[i] += x[2i] w[2i] + x[2i+1] w[2i+1] over bfloat16 pairs.
inline V add_dots(V sum, U x, U w) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(w));
  return sum;
}
inline void narrow_pair(uint16_t* to, V first, V second) {
  U both;
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(first), "v"(second));
  store(to, both);
}

#elif defined(SUREFOOT_EMULATED)

std::string dots_missing() { return ""; }
std::string ask_for_tiles() { return ""; }

[[noreturn]] void invalid_opcode(const char* why) {
  std::fprintf(stderr, "emulated tiles: %s\n", why);
  std::abort();
}
thread_local TileConfig config_now{0};
thread_local float tiles_now[8][16][16];

inline float flush(float x) { return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x; }
inline float flushed_fma(float a, float b, float c) { return flush(std::fma(flush(a), flush(b), flush(c))); }
inline float half_of(uint32_t pair, int which) {
  const uint32_t bits = which ? pair & 0xffff0000u : pair << 16;
  return load<float>(&bits);
}
void need_configured(int tile) {
  if (config_now.palette != 1 || config_now.rows[tile] == 0) invalid_opcode("a tile is used that is not configured");
}
inline void configure_tiles(const TileConfig& config) {
  for (int t = 0; t < 16; ++t)
    if (config.rows[t] > 16 || config.row_bytes[t] > 64 || (t > 7 && config.rows[t])) invalid_opcode("bad configuration");
  config_now = config;
  std::memset(tiles_now, 0, sizeof tiles_now);
}
inline void release_tiles() { config_now = TileConfig{0}; }
template <int T>
void load_tile(const void* from, int64_t row_stride) {
  need_configured(T);
  std::memset(tiles_now[T], 0, sizeof tiles_now[T]);
  for (int r = 0; r < config_now.rows[T]; ++r)
    std::memcpy(tiles_now[T][r], (const char*)from + r * row_stride, config_now.row_bytes[T]);
}
template <int T>
void store_tile(void* to, int64_t row_stride) {
  need_configured(T);
  for (int r = 0; r < config_now.rows[T]; ++r)
    std::memcpy((char*)to + r * row_stride, tiles_now[T][r], config_now.row_bytes[T]);
}
// TDPBF16PS: the even and the odd products of a row of A are summed in two chains, whose sum is added to C.
template <int C, int A, int B>
void multiply_tiles() {
  for (int tile : {C, A, B}) need_configured(tile);
  const TileConfig& now = config_now;
  if (now.rows[C] != now.rows[A] || now.row_bytes[C] != now.row_bytes[B] || now.row_bytes[A] != 4 * now.rows[B])
    invalid_opcode("shapes do not fit");
  for (int m = 0; m < now.rows[C]; ++m) {
    float chain[2][16] = {};
    for (int k = 0; k < now.row_bytes[A] / 4; ++k)
      for (int n = 0; n < now.row_bytes[C] / 4; ++n)
        for (int odd = 0; odd < 2; ++odd)
          chain[odd][n] = flushed_fma(half_of(load<uint32_t>(&tiles_now[A][m][k]), odd),
                                      half_of(load<uint32_t>(&tiles_now[B][k][n]), odd), chain[odd][n]);
    for (int n = 0; n < now.row_bytes[C] / 4; ++n)
      tiles_now[C][m][n] = flush(flush(tiles_now[C][m][n]) + flush(chain[0][n] + chain[1][n]));
  }
}
// VDPBF16PS: the odd product first.
inline V add_dots(V sum, U x, U w) {
  for (int i = 0; i < LANES; ++i)
    for (int odd = 1; odd >= 0; --odd) sum[i] = flushed_fma(half_of(x[i], odd), half_of(w[i], odd), sum[i]);
  return sum;
}
inline void narrow_pair(uint16_t* to, V first, V second) {
  store(to, narrow(first));
  store(to + LANES, narrow(second));
}

#else

std::string dots_missing() { return "these kernels were not built for AVX-512"; }
std::string ask_for_tiles() { return dots_missing(); }

#endif

// Asked once per process.
const std::string& tiles_missing() {
  static const std::string reason = ask_for_tiles();
  return reason;
}

}  // namespace
