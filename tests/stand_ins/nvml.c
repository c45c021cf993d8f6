/* A stand-in for libnvidia-ml.so.1: as much of NVML's C interface as autotune asks for, answered from
 * environment variables, so that the code that reads GPUs runs on a machine without one.
 *
 *   STAND_IN_GPUS        how many GPUs there are (1)
 *   STAND_IN_CAPABILITY  compute capability of each (9.0)
 *   STAND_IN_DRIVER      version of the driver (580.1)
 *   STAND_IN_PROCESSES   pid=name=MiB, comma-separated; a size of - is one that the driver does not know
 *   STAND_IN_ERRORS      function=code or function:gpu=code, comma-separated: what shall fail, and how
 *   STAND_IN_USED        GiB in use on each (2)
 *   STAND_IN_EVENTS      why clocks are low, as NVML's bits (0)
 *   STAND_IN_CLOCK       MHz of the multiprocessors (1980)
 *   STAND_IN_CELSIUS     temperature (40)
 *   STAND_IN_ECC         uncorrectable memory errors so far (0)
 *   STAND_IN_WATTS       the power limit (700)
 *   STAND_IN_BUSY        pid=per cent, comma-separated: who computes
 *   STAND_IN_DRAWING     pids, comma-separated: which of the processes only draw
 *   STAND_IN_MIG         how many MIG instances GPU 0 is split into; without it MIG is off
 *   STAND_IN_LOG         a file that gets the name of every function called, one a line
 *
 * GPU n has the UUID GPU-0000000n-..., n GiB of memory more than 79, and 1 GiB reserved. MIG-1 and MIG-2 are instances
 * of GPU 0 with 10 GiB each, which can be named in either case. As the real library does, it calls itself uninitialised in a process forked from the one
 * that initialised it; a shutdown there, which would spoil the parent's session, ends the process.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7 };
#define GIB (1ULL << 30)
#define MOST_GPUS 16
#define MIG MOST_GPUS
#define MOST_INSTANCES 2
#define IS_MIG(device) ((device)->number >= MIG)

typedef struct { int number; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned pid; unsigned long long used; } Process;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process3;

typedef struct { unsigned pid; unsigned long long time; unsigned multiprocessors, memory, encoder, decoder; } Sample;

static Device devices[MOST_GPUS + MOST_INSTANCES];
static pid_t owner;

static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}

static int gpus(void) { return atoi(setting("STAND_IN_GPUS", "1")); }

/* The code that a function shall answer with for a GPU; -1 stands for no GPU in particular. */
static int planned(const char *function, int gpu) {
    char list[1024], wanted[128];
    const char *log = getenv("STAND_IN_LOG");
    FILE *file = log ? fopen(log, "a") : NULL;
    if (file) {
        fprintf(file, "%s\n", function);
        fclose(file);
    }
    snprintf(list, sizeof list, "%s", setting("STAND_IN_ERRORS", ""));
    snprintf(wanted, sizeof wanted, "%s:%d", function, gpu);
    for (char *entry = strtok(list, ","); entry; entry = strtok(NULL, ",")) {
        char *code = strchr(entry, '=');
        if (!code) continue;
        *code = 0;
        if (!strcmp(entry, function) || !strcmp(entry, wanted)) return atoi(code + 1);
    }
    return SUCCESS;
}

#define BEGIN(gpu) \
    do { \
        int code = planned(__func__, gpu); \
        if (code) return code; \
        if (owner != getpid()) return UNINITIALIZED; \
    } while (0)

static int start(const char *function) {
    int code = planned(function, -1);
    if (code) return code;
    for (int number = 0; number < MIG + MOST_INSTANCES; number++) devices[number].number = number;
    owner = getpid();
    return SUCCESS;
}

int nvmlInit_v2(void) { return start("nvmlInit"); }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return start("nvmlInit"); }

int nvmlShutdown(void) {
    if (owner != getpid()) abort();
    BEGIN(-1);
    owner = 0;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { (void)code; return "A code of the stand-in's own"; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    BEGIN(-1);
    snprintf(text, size, "%s", setting("STAND_IN_DRIVER", "580.1"));
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) { BEGIN(-1); *count = gpus(); return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    BEGIN((int)index);
    if ((int)index >= gpus()) return INVALID_ARGUMENT;
    *device = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned size) {
    BEGIN(device->number);
    if (IS_MIG(device)) snprintf(text, size, "MIG-%d", device->number - MIG + 1);
    else snprintf(text, size, "GPU-%08x-1111-2222-3333-444444444444", device->number);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    char own[80];
    BEGIN(-1);
    for (int number = MIG; number < MIG + MOST_INSTANCES; number++) {
        snprintf(own, sizeof own, "MIG-%d", number - MIG + 1);
        if (strcmp(uuid, own)) continue;
        *device = &devices[number];
        return SUCCESS;
    }
    for (int number = 0; number < gpus(); number++) {
        nvmlDeviceGetUUID(&devices[number], own, sizeof own);
        if (strcmp(uuid, own)) continue;
        *device = &devices[number];
        return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *instance, Device **device) {
    BEGIN(instance->number);
    if (!IS_MIG(instance)) return INVALID_ARGUMENT;
    *device = &devices[0];
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *now, unsigned *later) {
    BEGIN(device->number);
    if (device->number) return NOT_SUPPORTED;
    *now = *later = getenv("STAND_IN_MIG") != NULL;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
    BEGIN(device->number);
    *count = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **instance) {
    BEGIN(device->number);
    if ((int)index >= atoi(setting("STAND_IN_MIG", "0"))) return NOT_FOUND;
    *instance = &devices[MIG + index];
    return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned size) {
    BEGIN(device->number);
    snprintf(text, size, IS_MIG(device) ? "Stand-in GPU MIG 1g.10gb" : "Stand-in GPU");
    return SUCCESS;
}

static unsigned long long total(const Device *device) {
    return (IS_MIG(device) ? 10 : 79 + device->number) * GIB;
}

static unsigned long long used_bytes(void) { return strtoull(setting("STAND_IN_USED", "2"), NULL, 10) * GIB; }

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    BEGIN(device->number);
    memory->total = total(device);
    memory->used = used_bytes() + GIB;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory2 *memory) {
    BEGIN(device->number);
    if (memory->version != (sizeof *memory | 2U << 24)) return INVALID_ARGUMENT;
    memory->total = total(device);
    memory->reserved = 1 * GIB;
    memory->used = used_bytes();
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) {
    BEGIN(device->number);
    if (IS_MIG(device)) return NOT_SUPPORTED;
    sscanf(setting("STAND_IN_CAPABILITY", "9.0"), "%d.%d", major, minor);
    return SUCCESS;
}

/* 300 W from the first reading on, by the readings: one a second. */
int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *millijoules) {
    static unsigned long long readings;
    BEGIN(device->number);
    if (IS_MIG(device)) return NOT_SUPPORTED;
    *millijoules = 7000000 + 300000 * readings++;
    return SUCCESS;
}

/* Pid, name and bytes of the process at a place in STAND_IN_PROCESSES; 0 past the end. */
static int process_at(unsigned place, unsigned *pid, char *name, unsigned long long *used) {
    char list[1024], size[32], *entry;
    snprintf(list, sizeof list, "%s", setting("STAND_IN_PROCESSES", ""));
    entry = strtok(list, ",");
    while (entry && place--) entry = strtok(NULL, ",");
    if (!entry || sscanf(entry, "%u=%63[^=]=%31s", pid, name, size) != 3) return 0;
    *used = *size == '-' ? ~0ULL : strtoull(size, NULL, 10) << 20;
    return 1;
}

static int only_draws(unsigned pid) {
    char list[256];
    snprintf(list, sizeof list, "%s", setting("STAND_IN_DRAWING", ""));
    for (char *entry = strtok(list, ","); entry; entry = strtok(NULL, ","))
        if ((unsigned)atoi(entry) == pid) return 1;
    return 0;
}

#define LIST_PROCESSES(count, list, draw) \
    do { \
        unsigned pid, found = 0, room = *(count); \
        unsigned long long used; \
        char name[64]; \
        for (unsigned place = 0; process_at(place, &pid, name, &used); place++) { \
            if (!(draw) && only_draws(pid)) continue; \
            if (found < room) { (list)[found].pid = pid; (list)[found].used = used; } \
            found++; \
        } \
        *(count) = found; \
        return found > room ? TOO_SMALL : SUCCESS; \
    } while (0)

int nvmlDeviceGetComputeRunningProcesses(Device *device, unsigned *count, Process *list) {
    BEGIN(device->number);
    LIST_PROCESSES(count, list, 0);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process3 *list) {
    BEGIN(device->number);
    LIST_PROCESSES(count, list, 0);
}

int nvmlDeviceGetGraphicsRunningProcesses(Device *device, unsigned *count, Process *list) {
    BEGIN(device->number);
    LIST_PROCESSES(count, list, 1);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, unsigned *count, Process3 *list) {
    BEGIN(device->number);
    LIST_PROCESSES(count, list, 1);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    BEGIN(device->number);
    *reasons = strtoull(setting("STAND_IN_EVENTS", "0"), NULL, 10);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    BEGIN(device->number);
    *reasons = strtoull(setting("STAND_IN_EVENTS", "0"), NULL, 10);
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(Device *device, int type, unsigned *mhz) {
    BEGIN(device->number);
    if (type != 1) return INVALID_ARGUMENT;
    *mhz = atoi(setting("STAND_IN_CLOCK", "1980"));
    return SUCCESS;
}

int nvmlDeviceGetPowerManagementLimit(Device *device, unsigned *milliwatts) {
    BEGIN(device->number);
    if (IS_MIG(device)) return NOT_SUPPORTED;
    *milliwatts = 1000 * atoi(setting("STAND_IN_WATTS", "700"));
    return SUCCESS;
}

int nvmlDeviceGetApplicationsClock(Device *device, int type, unsigned *mhz) {
    BEGIN(device->number);
    if (type != 0 && type != 2) return INVALID_ARGUMENT;
    *mhz = type == 0 ? 1980 : 3201;
    return SUCCESS;
}

int nvmlDeviceGetEccMode(Device *device, int *now, int *later) {
    BEGIN(device->number);
    *now = 1;
    *later = 0;
    return SUCCESS;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *celsius) {
    BEGIN(device->number);
    if (sensor) return INVALID_ARGUMENT;
    *celsius = atoi(setting("STAND_IN_CELSIUS", "40"));
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *errors) {
    BEGIN(device->number);
    if (type != 1 || counter != 0) return INVALID_ARGUMENT;
    *errors = strtoull(setting("STAND_IN_ECC", "0"), NULL, 10);
    return SUCCESS;
}

int nvmlDeviceGetProcessUtilization(Device *device, Sample *list, unsigned *count, unsigned long long since) {
    char busy[1024];
    unsigned found = 0, room = list ? *count : 0;
    BEGIN(device->number);
    if (!since) return INVALID_ARGUMENT;
    snprintf(busy, sizeof busy, "%s", setting("STAND_IN_BUSY", ""));
    for (char *entry = strtok(busy, ","); entry; entry = strtok(NULL, ","), found++) {
        if (found >= room) continue;
        list[found] = (Sample){.pid = atoi(entry), .time = since, .multiprocessors = atoi(strchr(entry, '=') + 1)};
    }
    *count = found;
    return !found ? NOT_FOUND : found > room ? TOO_SMALL : SUCCESS;
}

int nvmlSystemGetProcessName(unsigned pid, char *text, unsigned size) {
    unsigned other;
    unsigned long long used;
    char name[64];
    BEGIN(-1);
    for (unsigned place = 0; process_at(place, &other, name, &used); place++) {
        if (other != pid) continue;
        snprintf(text, size, "%s", name);
        return SUCCESS;
    }
    return NOT_FOUND;
}
