// How many threads share a piece of work.

#pragma once

#include <ATen/Parallel.h>

namespace {

// For `parts` pieces: all threads, or the calling one alone where there is little to do. Never some of them: libgomp ends those
// that a smaller team has no place for, and the next team of all has to start them again.
inline int team(int64_t parts, int64_t work) { return parts < 2 || work < 32768 ? 1 : at::get_num_threads(); }

}  // namespace
