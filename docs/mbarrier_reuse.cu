// What shared GPUs did to attention's results, without graphrt: an mbarrier's memory that is used for data.
//
// Each block makes an mbarrier, then stores numbers over it, lets some microseconds pass, and reads them again. The PTX
// ISA asks for mbarrier.inval before the memory is used for anything else. Without it nothing happens as long as a
// process has the GPU for itself; when processes take turns, blocks find the barrier's first state (0x7ffff800001ffffe
// for a count of 1) where their numbers were. The block takes a multiprocessor's shared memory for itself, as the
// kernel did where this was found; small blocks did not show it.
//
//   nvcc -gencode=arch=compute_90a,code=sm_90a -O2 -o mbarrier_reuse mbarrier_reuse.cu
//   for i in 1 2 3 4 5 6 7 8; do ./mbarrier_reuse 3 0 & done; wait      # 0: without mbarrier.inval, 1: with it
#include <cstdio>
#include <cstdlib>
#include <chrono>
#include <cuda_runtime.h>

constexpr unsigned BYTES = 229376, AT = 131072 / 4, WORDS = 4096;
__device__ unsigned changed, example[2];

__device__ unsigned number(unsigned i) { return 0x3c003c00u + i; }

__global__ void reuse(bool invalidate, long long cycles) {
    extern __shared__ __align__(1024) unsigned memory[];
    volatile unsigned* data = memory + AT;
    unsigned barrier = (unsigned)__cvta_generic_to_shared(memory + AT);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
        if (invalidate) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < WORDS; i += blockDim.x) data[i] = number(i);
    long long end = clock64() + cycles;
    while (__syncthreads_and(clock64() < end));
    for (unsigned i = threadIdx.x; i < WORDS; i += blockDim.x)
        if (data[i] != number(i)) {
            atomicAdd(&changed, 1u);
            if (i < 2) example[i] = data[i];
        }
}

static void check(cudaError_t error) {
    if (error != cudaSuccess) {
        printf("%s\n", cudaGetErrorString(error));
        exit(2);
    }
}

int main(int argc, char** argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 3;
    bool invalidate = argc > 2 && atoi(argv[2]);
    long long launches = 0;
    check(cudaFuncSetAttribute(reuse, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
    auto start = std::chrono::steady_clock::now();
    while (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() < seconds) {
        for (int i = 0; i < 64; i++, launches++) reuse<<<132, 384, BYTES>>>(invalidate, 50000);
        check(cudaGetLastError());
        check(cudaDeviceSynchronize());
    }
    unsigned n, words[2];
    check(cudaMemcpyFromSymbol(&n, changed, sizeof n));
    check(cudaMemcpyFromSymbol(words, example, sizeof words));
    printf("launches %lld words changed %u, for example to 0x%08x%08x\n", launches, n, words[1], words[0]);
    return n != 0;
}
