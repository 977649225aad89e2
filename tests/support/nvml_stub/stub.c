/* A stand-in for libnvidia-ml.so.1 that answers from a text file.
 *
 * Not compared by a test with the library: written after nvml.h. The real nvidia-ml-py runs over it, and
 * tests/gpu asks the real library what this one is asked.
 *
 * The file is named by the environment variable NVML_STUB_SCENARIO. A line is a
 * word and its values; lines from `gpu` or `instance` on describe that device:
 *
 *   driver 550.54.14
 *   gpu GPU-1 Tesla V100-SXM2-32GB      uuid, then the name to the end of the line
 *   memory 32768 258                    MiB in all; MiB kept by the driver
 *   used 4096                           MiB in use, those of the driver left out
 *   busy 87                             percent of the time in which it computed
 *   heat 61                             degrees Celsius
 *   power 231500                        milliwatts
 *   cores 5120 7 0                      CUDA cores, and compute capability 7.0
 *   bus 3b                              PCI bus (hexadecimal); domain and slot are 0
 *   nodes 2                             NUMA nodes beside it: a set of bits (hexadecimal)
 *   link 0 gpu 5e                       NVLink 0 is active and ends at that bus,
 *   link 1 switch c4                    or at that switch
 *   mig 7                               MIG mode is on, for at most 7 instances; 0 is off
 *   instance MIG-1 A100 MIG 1g.5gb      an instance of the last gpu: uuid, name
 *   ids 9 0                             the numbers of its GPU instance and compute instance
 *   mode 3                              compute mode: 0 default, 2 prohibited, 3 exclusive process
 *   fail nvmlDeviceGetName 15           that query of that device returns that code
 *   fail * 15                           every query of it does
 *   slow 2                              every query of it takes so many seconds; before the first gpu:
 *                                       the initialisation of the library does
 *   process 4711 300                    process 4711 computes on it and uses 300 MiB,
 *   process 4712 - mps                  or an amount that is not told, through MPS;
 *   process 4713 12 graphics            one that draws
 *   works 4711 87                       process 4711 has used 87% of its multiprocessors lately; 0 for none
 *
 * A `fail` before the first gpu is for the queries of the library itself. What a
 * device does not say is not supported, as on real cards. Building with
 * -DnvmlX=absent gives a library without nvmlX, as older drivers have.
 *
 * The file is read again when it has been replaced: devices keep their places in it.
 * At exit it complains on stderr if it was initialised and not shut down.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS, UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND = 6, INSUFFICIENT_SIZE, FUNCTION_NOT_FOUND = 13 };
enum { TO_GPU = 0, TO_SWITCH = 2 };
enum { DEVICES = 128, LINKS = 36, FAILURES = 16, PROCESSES = 2048 };

struct device {
    struct device *gpu; /* of a MIG instance; NULL for a GPU */
    char uuid[96], name[96];
    unsigned long long memory, reserved; /* MiB; memory 0 is not told */
    unsigned long long used;
    unsigned bus, knows_mig, mig, cores, major, minor;
    unsigned knows_ids, gpu_instance, compute_instance, knows_mode, mode;
    unsigned slow, knows_busy, busy, knows_heat, heat, knows_power, power;
    unsigned long long nodes;
    struct { int active, kind; unsigned bus; } links[LINKS];
    struct { char query[64]; int code; } failures[FAILURES];
    int failing;
};

/* nvmlProcessUtilizationSample_t */
struct sample { unsigned pid; unsigned long long at; unsigned sm, memory, encoder, decoder; };
struct process { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; };

static struct device library, devices[DEVICES];
static struct { struct device *device; struct process process; char kind[12]; } processes[PROCESSES];
static struct { struct device *device; struct sample sample; } samples[PROCESSES];
static int count, users, running, sampled;
static struct stat last;
static char driver[80];

static void bad(const char *line) {
    fprintf(stderr, "nvml stub: bad line in the scenario: %s\n", line);
    exit(70);
}

static struct device *add(struct device *gpu, const char *text) {
    struct device *device = &devices[count++];
    if (count > DEVICES || sscanf(text, "%95s %95[^\n]", device->uuid, device->name) != 2) bad(text);
    device->gpu = gpu;
    return device;
}

static void read_link(struct device *device, const char *line) {
    unsigned link, bus;
    char kind[8];
    if (sscanf(line, "link %u %7s %x", &link, kind, &bus) != 3 || link >= LINKS) bad(line);
    device->links[link].active = 1;
    device->links[link].kind = strcmp(kind, "switch") ? TO_GPU : TO_SWITCH;
    device->links[link].bus = bus;
}

static void read_failure(struct device *device, const char *line) {
    if (device->failing == FAILURES) bad(line);
    int place = device->failing++;
    if (sscanf(line, "fail %63s %d", device->failures[place].query, &device->failures[place].code) != 2) bad(line);
}

static void read_work(struct device *device, const char *line) {
    if (sampled == PROCESSES) bad(line);
    struct sample *sample = &samples[sampled].sample;
    *sample = (struct sample){0, 0, 0, 0, 0, 0};
    if (sscanf(line, "works %u %u", &sample->pid, &sample->sm) != 2) bad(line);
    samples[sampled++].device = device;
}

static void read_process(struct device *device, const char *line) {
    char amount[24];
    if (running == PROCESSES) bad(line);
    struct process *process = &processes[running].process;
    char *kind = processes[running].kind;
    *process = (struct process){0, -1ULL, -1U, -1U};
    strcpy(kind, "compute");
    if (sscanf(line, "process %u %23s %11s", &process->pid, amount, kind) < 2) bad(line);
    if (amount[0] != '-') process->used = strtoull(amount, NULL, 10) << 20;
    processes[running++].device = device;
}

static void read_scenario(void) {
    const char *path = getenv("NVML_STUB_SCENARIO");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) bad("NVML_STUB_SCENARIO names no readable file");
    struct device *gpu = NULL, *device = &library;
    struct stat found;
    char line[256];
    if (!fstat(fileno(file), &found)) last = found;
    count = running = sampled = 0;
    memset(&library, 0, sizeof library);
    memset(devices, 0, sizeof devices);
    while (fgets(line, sizeof line, file)) {
        if (line[0] == '\n' || line[0] == '#') continue;
        if (!strncmp(line, "gpu ", 4)) device = gpu = add(NULL, line + 4);
        else if (!strncmp(line, "instance ", 9)) device = add(gpu, line + 9);
        else if (!strncmp(line, "link ", 5)) read_link(device, line);
        else if (!strncmp(line, "fail ", 5)) read_failure(device, line);
        else if (!strncmp(line, "process ", 8)) read_process(device, line);
        else if (!strncmp(line, "works ", 6)) read_work(device, line);
        else if (sscanf(line, "driver %79s", driver) == 1) continue;
        else if (sscanf(line, "memory %llu %llu", &device->memory, &device->reserved) == 2) continue;
        else if (sscanf(line, "slow %u", &device->slow) == 1) continue;
        else if (sscanf(line, "used %llu", &device->used) == 1) continue;
        else if (sscanf(line, "busy %u", &device->busy) == 1) device->knows_busy = 1;
        else if (sscanf(line, "heat %u", &device->heat) == 1) device->knows_heat = 1;
        else if (sscanf(line, "power %u", &device->power) == 1) device->knows_power = 1;
        else if (sscanf(line, "cores %u %u %u", &device->cores, &device->major, &device->minor) == 3) continue;
        else if (sscanf(line, "bus %x", &device->bus) == 1) continue;
        else if (sscanf(line, "mode %u", &device->mode) == 1) device->knows_mode = 1;
        else if (sscanf(line, "ids %u %u", &device->gpu_instance, &device->compute_instance) == 2)
            device->knows_ids = 1;
        else if (sscanf(line, "nodes %llx", &device->nodes) == 1) continue;
        else if (sscanf(line, "mig %u", &device->mig) == 1) device->knows_mig = 1;
        else bad(line);
    }
    fclose(file);
}

/* Read the scenario again if its file has been replaced by another. */
static void refresh(void) {
    struct stat found;
    if (stat(getenv("NVML_STUB_SCENARIO"), &found)) return;
    if (found.st_ino != last.st_ino || found.st_mtim.tv_nsec != last.st_mtim.tv_nsec) read_scenario();
}

__attribute__((constructor)) static void begin(void) { read_scenario(); }

__attribute__((destructor)) static void end(void) {
    if (users) fprintf(stderr, "nvml stub: initialised %d times more often than shut down\n", users);
}

/* What the scenario makes this query of this device return, if it does not succeed. */
static int failure(const struct device *device, const char *query) {
    for (int i = 0; i < device->failing; i++)
        if (!strcmp(device->failures[i].query, "*") || !strcmp(device->failures[i].query, query))
            return device->failures[i].code;
    return SUCCESS;
}

/* The first line of every query: the library is in use, and this query is not made to fail. */
#define QUERY(device)                                   \
    do {                                                \
        if (!users) return UNINITIALIZED;               \
        refresh();                                      \
        if ((device)->slow && (device) != &library) sleep((device)->slow); \
        int code = failure(device, __func__);           \
        if (code) return code;                          \
    } while (0)

static int copy(char *to, unsigned size, const char *text) {
    snprintf(to, size, "%s", text);
    return SUCCESS;
}

/* The n-th GPU (gpu is NULL), or the n-th instance of a GPU. */
static struct device *nth(const struct device *gpu, unsigned n) {
    for (int i = 0; i < count; i++)
        if (devices[i].gpu == gpu && n-- == 0) return &devices[i];
    return NULL;
}

/* ---- The library ---- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    refresh();
    if (library.slow) sleep(library.slow);
    int code = failure(&library, __func__);
    if (!code) users++;
    return code;
}

int nvmlShutdown(void) {
    QUERY(&library);
    users--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    (void)code;
    return "an error the stub was told to make";
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    QUERY(&library);
    return copy(version, size, driver);
}

int nvmlDeviceGetCount_v2(unsigned *number) {
    QUERY(&library);
    for (*number = 0; nth(NULL, *number); ++*number) {}
    return SUCCESS;
}

/* ---- Devices ---- */

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device) {
    QUERY(&library);
    *device = nth(NULL, index);
    return *device ? failure(*device, __func__) : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct device **device) {
    QUERY(&library);
    for (int i = 0; i < count; i++)
        if (!strcmp(devices[i].uuid, uuid)) {
            *device = &devices[i];
            return failure(*device, __func__);
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(struct device *device, char *uuid, unsigned size) {
    QUERY(device);
    return copy(uuid, size, device->uuid);
}

int nvmlDeviceGetNumGpuCores(struct device *device, unsigned *cores) {
    QUERY(device);
    if (!device->cores) return NOT_SUPPORTED;
    *cores = device->cores;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(struct device *device, int *major, int *minor) {
    QUERY(device);
    if (!device->cores) return NOT_SUPPORTED;
    *major = (int)device->major;
    *minor = (int)device->minor;
    return SUCCESS;
}

int nvmlDeviceGetName(struct device *device, char *name, unsigned size) {
    QUERY(device);
    return copy(name, size, device->name);
}

struct memory { unsigned long long total, free, used; };

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory) {
    QUERY(device);
    if (!device->memory) return NOT_SUPPORTED;
    /* Version 1 counts what the driver keeps as used. */
    unsigned long long used = device->reserved + device->used;
    *memory = (struct memory){device->memory << 20, (device->memory - used) << 20, used << 20};
    return SUCCESS;
}

struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *memory) {
    QUERY(device);
    if (!device->memory) return NOT_SUPPORTED;
    memory->total = device->memory << 20;
    memory->reserved = device->reserved << 20;
    memory->used = device->used << 20;
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

/* ---- What it does now ---- */

struct utilization { unsigned gpu, memory; };

int nvmlDeviceGetUtilizationRates(struct device *device, struct utilization *rates) {
    QUERY(device);
    *rates = (struct utilization){device->busy, 0};
    return device->knows_busy ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetTemperature(struct device *device, int sensor, unsigned *degrees) {
    QUERY(device);
    if (sensor) return INVALID_ARGUMENT;
    *degrees = device->heat;
    return device->knows_heat ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetPowerUsage(struct device *device, unsigned *milliwatts) {
    QUERY(device);
    *milliwatts = device->power;
    return device->knows_power ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMemoryAffinity(struct device *device, unsigned words, unsigned long *set, int scope) {
    QUERY(device);
    (void)scope;
    if (!device->nodes) return NOT_SUPPORTED;
    memset(set, 0, words * sizeof *set);
    set[0] = device->nodes;
    return SUCCESS;
}

/* ---- Processes ---- */

/* A GPU's list has those of its instances, too. */
static int list(struct device *device, const char *kind, unsigned *number, struct process *found) {
    unsigned room = *number;
    *number = 0;
    for (int i = 0; i < running; i++) {
        int there = processes[i].device == device || processes[i].device->gpu == device;
        if (!there || strcmp(processes[i].kind, kind)) continue;
        if (*number < room) found[*number] = processes[i].process;
        ++*number;
    }
    return *number > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *number, struct process *found) {
    QUERY(device);
    return list(device, "compute", number, found);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(struct device *device, unsigned *number, struct process *found) {
    QUERY(device);
    return list(device, "mps", number, found);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *device, unsigned *number, struct process *found) {
    QUERY(device);
    return device->gpu ? NOT_SUPPORTED : list(device, "graphics", number, found);
}

/* Those alone that have worked; a device of which nothing is said has no such query. */
int nvmlDeviceGetProcessUtilization(struct device *device, struct sample *found, unsigned *number,
                                    unsigned long long since) {
    QUERY(device);
    unsigned room = found ? *number : 0, known = 0;
    *number = 0;
    for (int i = 0; i < sampled; i++) {
        if (samples[i].device != device) continue;
        known = 1;
        unsigned long long now = (unsigned long long)time(NULL) * 1000000;
        if (!samples[i].sample.sm || now <= since) continue;
        samples[i].sample.at = now;
        if (*number < room) found[*number] = samples[i].sample;
        ++*number;
    }
    if (!known) return FUNCTION_NOT_FOUND;
    return !*number ? NOT_FOUND : *number > room ? INSUFFICIENT_SIZE : SUCCESS;
}

/* ---- MIG ---- */

int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending) {
    QUERY(device);
    *current = *pending = device->mig > 0;
    return device->knows_mig ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *most) {
    QUERY(device);
    *most = device->mig;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned index, struct device **instance) {
    QUERY(device);
    *instance = nth(device, index);
    return *instance ? failure(*instance, __func__) : NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(struct device *device, unsigned *id) {
    QUERY(device);
    *id = device->gpu_instance;
    return device->knows_ids ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeInstanceId(struct device *device, unsigned *id) {
    QUERY(device);
    *id = device->compute_instance;
    return device->knows_ids ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetComputeMode(struct device *device, unsigned *mode) {
    QUERY(device);
    *mode = device->mode;
    return device->knows_mode ? SUCCESS : NOT_SUPPORTED;
}

/* ---- PCI and NVLink ---- */

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };

static int place(struct pci *pci, unsigned bus) {
    memset(pci, 0, sizeof *pci);
    pci->bus = bus;
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", bus);
    snprintf(pci->text, sizeof pci->text, "00000000:%02X:00.0", bus);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *pci) {
    QUERY(device);
    return place(pci, device->bus);
}

int nvmlDeviceGetNvLinkState(struct device *device, unsigned link, unsigned *active) {
    QUERY(device);
    if (link >= LINKS) return INVALID_ARGUMENT;
    *active = device->links[link].active;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(struct device *device, unsigned link, struct pci *pci) {
    QUERY(device);
    return place(pci, device->links[link].bus);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(struct device *device, unsigned link, unsigned *kind) {
    QUERY(device);
    *kind = device->links[link].kind;
    return SUCCESS;
}
