// Enough of CUDA to run the .cu files on a CPU, one thread after another, with every access checked.
//
// The kernels neither synchronise nor share memory between threads, so the order of threads does not matter.
// Each load and store must be aligned and lie within the memory that the test has allowed; others are counted
// and not made. Loads by plain dereference (tables, spans) are not checked.
#pragma once

#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

struct Index3 {
    unsigned x = 1, y = 1, z = 1;
};
static Index3 threadIdx, blockIdx, blockDim, gridDim;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

struct Range {
    std::uintptr_t begin, end;
    bool writable;
};
static std::vector<Range> allowed;
static long long num_faults, num_stores;

static bool reachable(const void* pointer, std::size_t size, bool write) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    if (address % size == 0) {
        for (const Range& range : allowed) {
            if (address >= range.begin && address + size <= range.end && (range.writable || !write)) return true;
        }
    }
    ++num_faults;
    return false;
}

template <typename T>
static T __ldcg(const T* pointer) {
    T value{};
    if (reachable(pointer, sizeof(T), false)) std::memcpy(&value, pointer, sizeof(T));
    return value;
}

template <typename T>
static void __stcg(T* pointer, T value) {
    ++num_stores;
    if (reachable(pointer, sizeof(T), true)) std::memcpy(pointer, &value, sizeof(T));
}

static unsigned __umulhi(unsigned a, unsigned b) {
    return static_cast<unsigned>((static_cast<unsigned long long>(a) * b) >> 32);
}

using Runner = void (*)(void (*)(), void**);
static std::map<std::string, std::pair<Runner, void (*)()>> kernels;

template <typename... Args, std::size_t... At>
static void call(void (*kernel)(Args...), void** args, std::index_sequence<At...>) {
    kernel(*static_cast<std::remove_const_t<Args>*>(args[At])...);
}

template <typename... Args>
static int add(const char* name, void (*kernel)(Args...)) {
    kernels[name] = {[](void (*erased)(), void** args) {
                         call(reinterpret_cast<void (*)(Args...)>(erased), args, std::index_sequence_for<Args...>{});
                     },
                     reinterpret_cast<void (*)()>(kernel)};
    return 0;
}

extern "C" {
void allow(const void* begin, long long num_bytes, int writable) {
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    allowed.push_back({address, address + static_cast<std::uintptr_t>(num_bytes), writable != 0});
}

void forbid_all() { allowed.clear(); }

long long stores() { return num_stores; }

// Run one launch; return how many accesses were wrong, or -1 when no kernel has this name.
long long launch(const char* name, unsigned num_ctas, unsigned num_threads, void** args) {
    const auto found = kernels.find(name);
    if (found == kernels.end()) return -1;
    num_faults = num_stores = 0;
    gridDim.x = num_ctas;
    blockDim.x = num_threads;
    for (blockIdx.x = 0; blockIdx.x < num_ctas; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < num_threads; ++threadIdx.x) {
            found->second.first(found->second.second, args);
        }
    }
    return num_faults;
}
}
