/* A stand-in for libcuda.so.1 and libnvidia-ml.so.1: GPUs whose processes can be checkpointed.
 *
 * Not compared by a test with the driver: written after cuda.h. NVIDIA's own bindings run over it, and
 * tests/gpu does the same on a real one.
 *
 * The environment variable DRIVER_STUB names a folder in which it keeps what it knows:
 *
 *   PID        a process that uses CUDA: its state, the MiB that it has allocated, and on which GPU.
 *              `running 512 1`; the other states are locked, checkpointed and failed
 *   calls      what was called: `lock PID`, a line each
 *   scenario   what goes wrong, a line each:
 *
 *     gpus 2                   how many GPUs there are: GPU-1, GPU-2
 *     memory 8192              MiB of each GPU
 *     others 4096              MiB that processes of no interest have allocated on each
 *     start 300                milliseconds that cuInit takes
 *     copy 500                 milliseconds that moving the memory of a process takes
 *     driver 12040             what cuDriverGetVersion says
 *     absent                   this driver has no cuCheckpoint functions
 *     unseen PID               NVML does not list that process
 *     mps PID                  NVML lists it among those that compute through MPS
 *     unmeasured PID           NVML lists it, and does not say how much it uses
 *     fail CALL PID CODE       that call returns the code, and changes nothing
 *     break CALL PID CODE      and the process is in state `failed` from then on
 *     hang CALL PID            it never returns
 *     hold CALL PID            it returns, having done what it should, once this is no more in the scenario
 *     babble CALL PID          it writes to standard output what looks like an answer, and does what it should
 *     chatter CALL PID         it never returns, and writes without end
 *     lie CALL PID             it returns success, and changes nothing
 *     keep CALL PID            it changes the state, and the memory stays taken
 *     kill CALL PID            it does what it should; then whoever called it is killed (SIGKILL)
 *
 * CALL is lock, checkpoint, restore, unlock, state or init; PID may be `*`. A number at the
 * end of such a line says how many such calls go wrong; then all is well.
 * A busy process is `fail lock PID 600`: CUDA_ERROR_NOT_READY, once the timeout is over.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
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

struct process { int pid, state, mib, gpu; };

static int load(int pid, struct process *process) {
    char name[16], state[16];
    snprintf(name, sizeof name, "%d", pid);
    FILE *file = in_folder(name, "r");
    if (!file || (kill(pid, 0) && errno != EPERM)) return 0;
    process->pid = pid;
    process->state = STATES;
    if (fscanf(file, "%15s %d %d", state, &process->mib, &process->gpu) == 3)
        for (process->state = 0; process->state < STATES; process->state++)
            if (!strcmp(STATE[process->state], state)) break;
    fclose(file);
    return process->state < STATES;
}

/* In one step: whoever calls it may be killed meanwhile, and a driver's state is never half of one. */
static void save(const struct process *process) {
    char draft[512], path[512];
    snprintf(draft, sizeof draft, "%s/.%d", getenv("DRIVER_STUB"), process->pid);
    snprintf(path, sizeof path, "%s/%d", getenv("DRIVER_STUB"), process->pid);
    FILE *file = fopen(draft, "w");
    fprintf(file, "%s %d %d\n", STATE[process->state], process->mib, process->gpu);
    fclose(file);
    rename(draft, path);
}

static int occupies(const struct process *process) {
    return process->state == CHECKPOINTED ? calls_so_far("kept", process->pid) > 0 : 1;
}

static void record(const char *call, int pid) {
    FILE *file = in_folder("calls", "a");
    fprintf(file, "%s %d\n", call, pid);
    fclose(file);
}

static int free_mib(int gpu);

static void pause_ms(int ms) { usleep((unsigned)ms * 1000); }

static void chatter(void) {
    static char text[4096];
    memset(text, 'x', sizeof text);
    while (write(1, text, sizeof text) > 0) {}
    for (;;) pause();
}

/* Every call that changes a state: from one, to another, unless the scenario has it otherwise. */
static int change(const char *call, int pid, int from, int to) {
    struct process process;
    record(call, pid);
    if (!load(pid, &process)) return INVALID_VALUE;
    struct trouble wrong = trouble(call, pid);
    if (!strcmp(wrong.what, "fail")) return wrong.code;
    if (!strcmp(wrong.what, "lie")) return SUCCESS;
    if (!strcmp(wrong.what, "hang")) for (;;) pause();
    if (!strcmp(wrong.what, "chatter")) chatter();
    if (!strcmp(wrong.what, "babble")) puts("{\"done\": \"yes\"}\n{\"pid\": [1]}\n{\"used\": 1}\n[1]\n\377"), fflush(stdout);
    while (!strcmp(trouble(call, pid).what, "hold")) pause_ms(5);
    if (process.state != from) return ILLEGAL_STATE;
    int fits = strcmp(call, "restore") || process.mib <= free_mib(process.gpu);
    if (!strcmp(call, "restore") || !strcmp(call, "checkpoint")) pause_ms(told("copy", 0));
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
    record("init", getpid());
    pause_ms(told("start", 0));
    initialised = 1;
    return trouble("init", 0).code;
}

int cuDriverGetVersion(int *version) {
    *version = told("driver", 13000);
    return SUCCESS;
}

int cuCheckpointProcessGetState(int pid, int *state) {
    struct process process = {pid, RUNNING, 0, 1};
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

/* A device is known by the address of its number. */
static int number[] = {1, 2};
static int gpu_of(const void *device) { return *(const int *)device; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)told("gpus", 1);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index > 1) return 6;
    *device = &number[index];
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    int gpu = strncmp(uuid, "GPU-", 4) ? 0 : atoi(uuid + 4);
    if (gpu < 1 || gpu > told("gpus", 1)) return 6;
    *device = &number[gpu - 1];
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned size) {
    snprintf(uuid, size, "GPU-%d", gpu_of(device));
    return SUCCESS;
}

/* The processes on a GPU, at most 64. */
static int on_device(int gpu, struct process *found) {
    int count = 0;
    DIR *folder = opendir(getenv("DRIVER_STUB"));
    struct dirent *entry;
    while (folder && count < 64 && (entry = readdir(folder)))
        if (atoi(entry->d_name) > 0 && load(atoi(entry->d_name), &found[count]) && found[count].gpu == gpu
            && occupies(&found[count])) count++;
    if (folder) closedir(folder);
    return count;
}

static int free_mib(int gpu) {
    struct process found[64];
    int count = on_device(gpu, found), left = told("memory", 8192) - told("others", 0);
    for (int i = 0; i < count; i++) left -= found[i].mib;
    return left;
}

struct usage { unsigned pid; unsigned long long bytes; unsigned instance, compute; };

static int list_processes(int gpu, int by_mps, unsigned *number, struct usage *list) {
    struct process found[64];
    unsigned count = 0, room = *number;
    int all = on_device(gpu, found);
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
    return list_processes(gpu_of(device), 0, number, list);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *device, unsigned *number, struct usage *list) {
    return list_processes(gpu_of(device), 1, number, list);
}

struct memory { unsigned long long total, free, used; };

int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    int left_mib = free_mib(gpu_of(device));
    unsigned long long total = told("memory", 8192), left = left_mib > 0 ? left_mib : 0;
    *memory = (struct memory){total << 20, left << 20, (total - left) << 20};
    return SUCCESS;
}
