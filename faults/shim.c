/* Preloaded before libc: counts what a process does to files below one folder, writes it down, and kills the process
 * after one of these operations or in the middle of it.
 *
 *   FAULT_BELOW       the folder; without it nothing is counted
 *   FAULT_LOG         a file outside the folder: a line an operation, "<number> <name> <bytes> <path> [<new path>]"
 *   FAULT_KILL_AFTER  SIGKILL once the operation of this number (from 1) has been done
 *   FAULT_KILL_AMID   SIGKILL once half of the bytes of the operation of this number are written
 *
 * The environment is read at each operation until the first of these variables is there, so that a forked child can set
 * it. System calls that bypass libc, and writes to mapped memory, are not seen. Linux only.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char below[PATH_MAX];
static size_t below_length;
static int log_descriptor = -1;
static long kill_after, kill_amid;
static atomic_long operations;

static long number_from(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

static int armed(void) {
    if (below_length) return 1;
    const char *folder = getenv("FAULT_BELOW");
    if (!folder || !*folder) return 0;
    const char *log = getenv("FAULT_LOG");
    if (log) log_descriptor = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
    kill_after = number_from("FAULT_KILL_AFTER");
    kill_amid = number_from("FAULT_KILL_AMID");
    snprintf(below, sizeof below, "%s", folder);
    below_length = strlen(below);
    return 1;
}

static int is_below(const char *path) {
    return !strncmp(path, below, below_length) && (path[below_length] == '/' || !path[below_length]);
}

/* The path that a descriptor stands for; empty for pipes, sockets and what is closed. */
static const char *path_of(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    return path;
}

static const char *absolute(int folder, const char *name, char *path) {
    char above[PATH_MAX];
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else {
        if (folder == AT_FDCWD) {
            if (!getcwd(above, sizeof above)) above[0] = 0;
        } else {
            path_of(folder, above);
        }
        if (strlen(above) + strlen(name) + 2 > PATH_MAX) above[0] = 0;
        snprintf(path, PATH_MAX, "%.2000s/%.2000s", above, name);
    }
    return path;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Called once an operation below the folder is done. */
static void done(long number, const char *name, long bytes, const char *path, const char *other) {
    if (log_descriptor >= 0) {
        char line[3 * PATH_MAX];
        int length = snprintf(line, sizeof line, "%ld %s %ld %s%s%s\n", number, name, bytes, path, other ? " " : "",
                              other ? other : "");
        syscall(SYS_write, log_descriptor, line, (size_t)length);
    }
    if (number == kill_after) die();
}

static long next(void) { return atomic_fetch_add(&operations, 1) + 1; }

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* On a descriptor: `call` does it; `half` does half of it, where a process is to die amid it. */
#define ON_DESCRIPTOR(name, descriptor, bytes, call, half) \
    char path[PATH_MAX]; \
    if (!armed() || !is_below(path_of(descriptor, path))) return call; \
    long number = next(); \
    if (number == kill_amid) { (void)!(half); die(); } \
    __typeof__(call) result = call; \
    int error = errno; \
    done(number, name, bytes, path, NULL); \
    errno = error; \
    return result

#define ON_PATH(name, folder, file, call) \
    char path[PATH_MAX]; \
    if (!armed() || !is_below(absolute(folder, file, path))) return call; \
    __typeof__(call) result = call; \
    int error = errno; \
    if (result >= 0) done(next(), name, 0, path, NULL); \
    errno = error; \
    return result

#define ON_TWO_PATHS(name, old_folder, old, new_folder, new, call) \
    char path[PATH_MAX], other[PATH_MAX]; \
    if (!armed() || !is_below(absolute(new_folder, new, other))) return call; \
    __typeof__(call) result = call; \
    int error = errno; \
    if (result >= 0) done(next(), name, 0, absolute(old_folder, old, path), other); \
    errno = error; \
    return result

ssize_t write(int descriptor, const void *data, size_t size) {
    REAL(write);
    ON_DESCRIPTOR("write", descriptor, (long)size, real(descriptor, data, size), real(descriptor, data, size / 2));
}

ssize_t pwrite(int descriptor, const void *data, size_t size, off_t at) {
    REAL(pwrite);
    ON_DESCRIPTOR("pwrite", descriptor, (long)size, real(descriptor, data, size, at),
                  real(descriptor, data, size / 2, at));
}

ssize_t pwrite64(int descriptor, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
    ON_DESCRIPTOR("pwrite", descriptor, (long)size, real(descriptor, data, size, at),
                  real(descriptor, data, size / 2, at));
}

static size_t total(const struct iovec *parts, int count) {
    size_t bytes = 0;
    for (int number = 0; number < count; number++) bytes += parts[number].iov_len;
    return bytes;
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    REAL(writev);
    ON_DESCRIPTOR("writev", descriptor, (long)total(parts, count), real(descriptor, parts, count),
                  write(descriptor, parts[0].iov_base, parts[0].iov_len / 2));
}

ssize_t sendfile(int out, int in, off_t *at, size_t size) {
    REAL(sendfile);
    ON_DESCRIPTOR("sendfile", out, (long)size, real(out, in, at, size), real(out, in, at, 8));
}

ssize_t sendfile64(int out, int in, off64_t *at, size_t size) {
    REAL(sendfile64);
    ON_DESCRIPTOR("sendfile", out, (long)size, real(out, in, at, size), real(out, in, at, 8));
}

ssize_t copy_file_range(int in, off64_t *in_at, int out, off64_t *out_at, size_t size, unsigned flags) {
    REAL(copy_file_range);
    ON_DESCRIPTOR("copy", out, (long)size, real(in, in_at, out, out_at, size, flags),
                  real(in, in_at, out, out_at, 8, flags));
}

int fsync(int descriptor) {
    REAL(fsync);
    ON_DESCRIPTOR("fsync", descriptor, 0, real(descriptor), 0);
}

int fdatasync(int descriptor) {
    REAL(fdatasync);
    ON_DESCRIPTOR("fdatasync", descriptor, 0, real(descriptor), 0);
}

int ftruncate(int descriptor, off_t size) {
    REAL(ftruncate);
    ON_DESCRIPTOR("ftruncate", descriptor, (long)size, real(descriptor, size), 0);
}

int ftruncate64(int descriptor, off64_t size) {
    REAL(ftruncate64);
    ON_DESCRIPTOR("ftruncate", descriptor, (long)size, real(descriptor, size), 0);
}

int posix_fallocate(int descriptor, off_t at, off_t size) {
    REAL(posix_fallocate);
    ON_DESCRIPTOR("fallocate", descriptor, (long)size, real(descriptor, at, size), 0);
}

int rename(const char *old, const char *new) {
    REAL(rename);
    ON_TWO_PATHS("rename", AT_FDCWD, old, AT_FDCWD, new, real(old, new));
}

int renameat(int old_folder, const char *old, int new_folder, const char *new) {
    REAL(renameat);
    ON_TWO_PATHS("rename", old_folder, old, new_folder, new, real(old_folder, old, new_folder, new));
}

int renameat2(int old_folder, const char *old, int new_folder, const char *new, unsigned flags) {
    REAL(renameat2);
    ON_TWO_PATHS("rename", old_folder, old, new_folder, new, real(old_folder, old, new_folder, new, flags));
}

int link(const char *old, const char *new) {
    REAL(link);
    ON_TWO_PATHS("link", AT_FDCWD, old, AT_FDCWD, new, real(old, new));
}

int unlink(const char *file) {
    REAL(unlink);
    ON_PATH("unlink", AT_FDCWD, file, real(file));
}

int unlinkat(int folder, const char *file, int flags) {
    REAL(unlinkat);
    ON_PATH(flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, file, real(folder, file, flags));
}

int rmdir(const char *file) {
    REAL(rmdir);
    ON_PATH("rmdir", AT_FDCWD, file, real(file));
}

int mkdir(const char *file, mode_t mode) {
    REAL(mkdir);
    ON_PATH("mkdir", AT_FDCWD, file, real(file, mode));
}

int mkdirat(int folder, const char *file, mode_t mode) {
    REAL(mkdirat);
    ON_PATH("mkdir", folder, file, real(folder, file, mode));
}

/* Opening changes a folder where it may make or empty a file. */
#define OPEN(name, folder, file, flags, call) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    } \
    if (!(flags & (O_CREAT | O_TRUNC))) return call; \
    ON_PATH("create", folder, file, call)

int open(const char *file, int flags, ...) {
    REAL(open);
    OPEN(open, AT_FDCWD, file, flags, real(file, flags, mode));
}

int open64(const char *file, int flags, ...) {
    REAL(open64);
    OPEN(open64, AT_FDCWD, file, flags, real(file, flags, mode));
}

int openat(int folder, const char *file, int flags, ...) {
    REAL(openat);
    OPEN(openat, folder, file, flags, real(folder, file, flags, mode));
}

int openat64(int folder, const char *file, int flags, ...) {
    REAL(openat64);
    OPEN(openat64, folder, file, flags, real(folder, file, flags, mode));
}
