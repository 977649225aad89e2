/* A stand-in for libcuda.so.1 and libnvidia-ml.so.1: one GPU whose processes can be checkpointed.
 *
 * Not compared by a test with the driver: written after cuda.h. NVIDIA's own bindings run over it, and
 * tests/gpu does the same on a real one.
 *
 * The environment variable DRIVER_STUB names a folder in which it keeps what it knows:
 *
 *   PID        a process that uses CUDA: its state, and the MiB that it has allocated.
 *              `running 512`; the other states are locked, checkpointed and failed
 *   calls      what was called: `lock PID`, a line each
 *   scenario   what goes wrong, a line each:
 *
 *     memory 8192              MiB of the GPU
 *     others 4096              MiB that processes of no interest have allocated
 *     driver 12040             what cuDriverGetVersion says
 *     absent                   this driver has no cuCheckpoint functions
 *     unseen PID               NVML does not list that process
 *     mps PID                  NVML lists it among those that compute through MPS
 *     unmeasured PID           NVML lists it, and does not say how much it uses
 *     fail CALL PID CODE       that call returns the code, and changes nothing
 *     break CALL PID CODE      and the process is in state `failed` from then on
 *     hang CALL PID            it never returns
 *     lie CALL PID             it returns success, and changes nothing
 *     keep CALL PID            it changes the state, and the memory stays taken
 *     kill CALL PID            it does what it should; then whoever called it is killed (SIGKILL)
 *
 * CALL is lock, checkpoint, restore, unlock, state or init; PID may be `*`. A number at the
 * end of such a line says how many such calls go wrong; then all is well.
 * A busy process is `fail lock PID 600`: CUDA_ERROR_NOT_READY, once the timeout is over.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, ILLEGAL_STATE = 401, NOT_FOUND = 500 };
enum { RUNNING, LOCKED, CHECKPOINTED, FAILED, STATES };
static const char *const STATE[] = {"running", "locked", "checkpointed", "failed"};
static int initialised;

static FILE *in_folder(const char *name, const char *mode) {
    char path[512];
    const char *folder = getenv("DRIVER_STUB");
    if (!folder) exit(70);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, mode);
}

/* ---- The scenario ---- */

struct trouble { char what[16]; int code; };

static int calls_so_far(const char *call, int pid) {
    char line[64], wanted[64];
    int count = 0;
    FILE *file = in_folder("calls", "r");
    snprintf(wanted, sizeof wanted, "%s %d\n", call, pid);
    while (file && fgets(line, sizeof line, file)) count += !strcmp(line, wanted);
    if (file) fclose(file);
    return count;
}

/* What goes wrong with this call for this process; `what` is empty if nothing does. */
static struct trouble trouble(const char *call, int pid) {
    struct trouble none = {"", SUCCESS}, found = none;
    char line[128], about[16], whom[16], words[3][16];
    FILE *file = in_folder("scenario", "r");
    while (file && !found.what[0] && fgets(line, sizeof line, file)) {
        int numbers[2] = {0, 0};
        int read = sscanf(line, "%15s %15s %15s %d %d", words[0], about, whom, &numbers[0], &numbers[1]);
        if (read < 2 || strcmp(about, call)) continue;
        if (read >= 3 && strcmp(whom, "*") && atoi(whom) != pid) continue;
        int has_code = !strcmp(words[0], "fail") || !strcmp(words[0], "break");
        int times = read - has_code > 3 ? numbers[has_code] : 0;
        if (times && calls_so_far(call, pid) > times) continue;
        snprintf(found.what, sizeof found.what, "%s", words[0]);
        found.code = numbers[0];
    }
    if (file) fclose(file);
    return found;
}

/* A number or a mark of the scenario, such as `memory 8192` or `unseen 12`. */
static int told(const char *word, int otherwise) {
    char line[128], first[16];
    int value, found = otherwise;
    FILE *file = in_folder("scenario", "r");
    while (file && fgets(line, sizeof line, file)) {
        value = 1;
        if (sscanf(line, "%15s %d", first, &value) >= 1 && !strcmp(first, word)) found = value;
    }
    if (file) fclose(file);
    return found;
}

/* ---- The processes ---- */

struct process { int pid, state, mib; };

static int load(int pid, struct process *process) {
    char name[16], state[16];
    snprintf(name, sizeof name, "%d", pid);
    FILE *file = in_folder(name, "r");
    if (!file || kill(pid, 0)) return 0;
    process->pid = pid;
    process->state = STATES;
    if (fscanf(file, "%15s %d", state, &process->mib) == 2)
        for (process->state = 0; process->state < STATES; process->state++)
            if (!strcmp(STATE[process->state], state)) break;
    fclose(file);
    return process->state < STATES;
}

static void save(const struct process *process) {
    char name[16];
    snprintf(name, sizeof name, "%d", process->pid);
    FILE *file = in_folder(name, "w");
    fprintf(file, "%s %d\n", STATE[process->state], process->mib);
    fclose(file);
}

static int occupies(const struct process *process) {
    return process->state == CHECKPOINTED ? calls_so_far("kept", process->pid) > 0 : 1;
}

static void record(const char *call, int pid) {
    FILE *file = in_folder("calls", "a");
    fprintf(file, "%s %d\n", call, pid);
    fclose(file);
}

static int free_mib(void);

/* Every call that changes a state: from one, to another, unless the scenario has it otherwise. */
static int change(const char *call, int pid, int from, int to) {
    struct process process;
    record(call, pid);
    if (!load(pid, &process)) return INVALID_VALUE;
    struct trouble wrong = trouble(call, pid);
    if (!strcmp(wrong.what, "fail")) return wrong.code;
    if (!strcmp(wrong.what, "lie")) return SUCCESS;
    if (!strcmp(wrong.what, "hang")) for (;;) pause();
    if (process.state != from) return ILLEGAL_STATE;
    int fits = strcmp(call, "restore") || process.mib <= free_mib();
    process.state = !strcmp(wrong.what, "break") || !fits ? FAILED : to;
    save(&process);
    if (!strcmp(wrong.what, "break")) return wrong.code;
    if (!strcmp(wrong.what, "keep")) record("kept", pid);
    if (!strcmp(wrong.what, "kill")) kill(getpid(), SIGKILL);
    return fits ? SUCCESS : OUT_OF_MEMORY;
}

/* ---- libcuda.so.1 ---- */

int cuInit(unsigned flags) {
    (void)flags;
    initialised = 1;
    return trouble("init", 0).code;
}

int cuDriverGetVersion(int *version) {
    *version = told("driver", 13000);
    return SUCCESS;
}

int cuCheckpointProcessGetState(int pid, int *state) {
    struct process process = {pid, RUNNING, 0};
    struct trouble wrong = trouble("state", pid);
    if (!initialised) return NOT_INITIALIZED;
    if (!strcmp(wrong.what, "hang")) for (;;) pause();
    if (!load(pid, &process) && pid != getpid()) return INVALID_VALUE;
    *state = process.state;
    return wrong.code;
}

/* As https://docs.nvidia.com/cuda/cuda-driver-api/structCUcheckpointLockArgs.html has it. */
struct lock_args { unsigned timeout_ms, reserved0; unsigned long long reserved1[7]; };

int cuCheckpointProcessLock(int pid, struct lock_args *args) {
    /* Without a timeout a busy process would be waited for without end. */
    if (!args || !args->timeout_ms) return INVALID_VALUE;
    return change("lock", pid, RUNNING, LOCKED);
}

int cuCheckpointProcessCheckpoint(int pid, void *args) {
    (void)args;
    return change("checkpoint", pid, LOCKED, CHECKPOINTED);
}

int cuCheckpointProcessRestore(int pid, void *args) {
    (void)args;
    return initialised ? change("restore", pid, CHECKPOINTED, LOCKED) : NOT_INITIALIZED;
}

int cuCheckpointProcessUnlock(int pid, void *args) {
    (void)args;
    return change("unlock", pid, LOCKED, RUNNING);
}

int cuGetProcAddress_v2(const char *symbol, void **address, int version, unsigned long long flags, int *status) {
    (void)version, (void)flags;
    int absent = !strncmp(symbol, "cuCheckpoint", 12) && told("absent", 0);
    *address = absent ? NULL : dlsym(RTLD_DEFAULT, symbol);
    if (!*address && !absent) {
        static void *self;
        if (!self) self = dlopen("libcuda.so.1", RTLD_NOW);
        *address = self ? dlsym(self, symbol) : NULL;
    }
    if (status) *status = *address ? 0 : 1;
    return *address ? SUCCESS : NOT_FOUND;
}

/* ---- libnvidia-ml.so.1 ---- */

enum { NVML_INSUFFICIENT_SIZE = 7 };

int nvmlInitWithFlags(unsigned flags) { return (int)(flags & 0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code ? "an error the stub was told to make" : "success"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 1;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &initialised;
    return (int)index;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &initialised;
    return strcmp(uuid, "GPU-1") ? 6 : SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    (void)device;
    snprintf(uuid, size, "GPU-1");
    return SUCCESS;
}

/* The processes on the GPU, at most 64. */
static int on_device(struct process *found) {
    char command[600], name[64];
    int count = 0;
    snprintf(command, sizeof command, "ls '%s'", getenv("DRIVER_STUB"));
    FILE *names = popen(command, "r");
    while (names && count < 64 && fgets(name, sizeof name, names))
        if (atoi(name) > 0 && load(atoi(name), &found[count]) && occupies(&found[count])) count++;
    if (names) pclose(names);
    return count;
}

static int free_mib(void) {
    struct process found[64];
    int count = on_device(found), left = told("memory", 8192) - told("others", 0);
    for (int i = 0; i < count; i++) left -= found[i].mib;
    return left;
}

struct usage { unsigned pid; unsigned long long bytes; unsigned instance, compute; };

static int list_processes(int by_mps, unsigned *number, struct usage *list) {
    struct process found[64];
    unsigned count = 0, room = *number;
    int all = on_device(found);
    for (int i = 0; i < all; i++) {
        if (told("unseen", 0) == found[i].pid || (told("mps", 0) == found[i].pid) != by_mps) continue;
        int measured = told("unmeasured", 0) != found[i].pid;
        if (count++ < room)
            list[count - 1] = (struct usage){found[i].pid, measured ? (unsigned long long)found[i].mib << 20 : -1ULL, 0, 0};
    }
    *number = count;
    return count > room ? NVML_INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *number, struct usage *list) {
    (void)device;
    return list_processes(0, number, list);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *number, struct usage *list) {
    (void)device;
    return list_processes(1, number, list);
}

struct memory { unsigned long long total, free, used; };

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    (void)device;
    unsigned long long total = told("memory", 8192), left = free_mib() > 0 ? free_mib() : 0;
    *memory = (struct memory){total << 20, left << 20, (total - left) << 20};
    return SUCCESS;
}
