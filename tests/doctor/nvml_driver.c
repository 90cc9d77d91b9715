/* A driver's management library as far as doctor asks it: NVIDIA's own Python package loads it in place of the real one.

   GPU 0 is free, GPU 1 is used by the process in FAKE_NVML_PID, GPU 2 is cut into two MIG instances, GPU 3 is lost. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SUCCESS 0
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define GPU_IS_LOST 15
#define GIB (1ULL << 30)

typedef struct { int number; } device;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process;

static device devices[] = {{0}, {1}, {2}, {3}, {20}, {21}};

int nvmlInitWithFlags(unsigned flags) {
    const char *wanted = getenv("FAKE_NVML_INIT");
    if (wanted && !strcmp(wanted, "hang")) for (;;) sleep(60);
    return wanted ? atoi(wanted) : SUCCESS;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
const char *nvmlErrorString(int code) {
    return code == GPU_IS_LOST ? "GPU is lost" : code == 18 ? "Driver/library version mismatch" : "an error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.95.05"); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 4; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **found) {
    if (index == 3) return GPU_IS_LOST;
    *found = &devices[index];
    return SUCCESS;
}
int nvmlDeviceGetName(device *one, char *text, unsigned size) {
    snprintf(text, size, one->number < 20 ? "NVIDIA H100 80GB HBM3" : "NVIDIA H100 80GB HBM3 MIG 3g.40gb");
    return SUCCESS;
}
int nvmlDeviceGetUUID(device *one, char *text, unsigned size) {
    snprintf(text, size, one->number < 20 ? "GPU-%d" : "MIG-%d", one->number);
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(device *one, memory *out) {
    out->total = one->number < 20 ? 80 * GIB : 40 * GIB;
    out->used = one->number == 1 ? 70 * GIB : 1 << 20;
    return SUCCESS;
}
int nvmlDeviceGetComputeMode(device *one, int *mode) { *mode = 0; return SUCCESS; }
int nvmlDeviceGetMigMode(device *one, unsigned *now, unsigned *pending) {
    if (one->number == 0) return NOT_SUPPORTED;
    *now = *pending = one->number == 2;
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(device *one, unsigned rates[2]) {
    rates[0] = one->number == 1 ? 97 : 0;
    rates[1] = 0;
    return SUCCESS;
}
int nvmlDeviceGetTemperature(device *one, int sensor, unsigned *degrees) { *degrees = 40 + one->number; return SUCCESS; }
int nvmlDeviceGetPowerUsage(device *one, unsigned *milliwatts) {
    if (one->number == 2) return NOT_SUPPORTED;
    *milliwatts = 70500;
    return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(device *one, unsigned *count) { *count = 7; return SUCCESS; }
int nvmlDeviceGetMigDeviceHandleByIndex(device *one, unsigned index, device **found) {
    if (index > 1) return NOT_FOUND;
    *found = &devices[4 + index];
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device *one, unsigned *count, process *found) {
    const char *pid = getenv("FAKE_NVML_PID");
    if (one->number != 1 || !pid) { *count = 0; return SUCCESS; }
    if (*count < 1) { *count = 1; return INSUFFICIENT_SIZE; }
    *count = 1;
    found[0].pid = (unsigned)atoi(pid);
    found[0].used = 69 * GIB;
    return SUCCESS;
}
