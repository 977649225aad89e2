/* A stand-in for libcuda.so.1, as far as a probe of a device needs one.
 *
 * CUDA_STUB is what cuInit, cuCtxCreate and an allocation past the limit return,
 * three numbers: "0 46 2" is a device that is exclusive to another process. The
 * limit, in MiB, is the first one in CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, and is
 * lifted where that has the value of CUDA_STUB_EVADED. Compared with driver
 * 580.159.04 on an H100: 46 and 2 are what it answers, and a second device, or a
 * value that cannot be read, lifts its limits. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int codes[3];

int cuInit(unsigned flags) {
    const char *told = getenv("CUDA_STUB");
    if (flags || !told || sscanf(told, "%d %d %d", &codes[0], &codes[1], &codes[2]) != 3) return 999;
    return codes[0];
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return getenv("CUDA_VISIBLE_DEVICES") ? 0 : 100;
}

int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    (void)flags, (void)device;
    *context = &codes;
    return getenv("CUDA_MPS_PIPE_DIRECTORY") ? 0 : codes[1];
}

int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes) {
    const char *limit = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    *pointer = 1;
    const char *evaded = getenv("CUDA_STUB_EVADED");
    if (!limit || (evaded && !strcmp(limit, evaded))) return 0;
    return bytes >> 20 > strtoul(limit + 2, NULL, 10) ? codes[2] : 0;
}
