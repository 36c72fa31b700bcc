/* Preloaded: the clock on the wall is ahead by as many seconds as the file $SET_CLOCK_FILE says (a long, as C has it).
 * What the kernel counts since the machine was started is left alone, as it is when a clock is set.
 *
 * Not libfaketime: with its CLOCK_MONOTONIC left alone (0.9.10) every sleep of Python 3.11 fails with EINVAL.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *ahead_seconds;

__attribute__((constructor)) static void map_file(void)
{
    const char *path = getenv("SET_CLOCK_FILE");
    int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (descriptor < 0)
        return;
    void *page = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, descriptor, 0);
    if (page != MAP_FAILED)
        ahead_seconds = page;
    close(descriptor);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && ahead_seconds && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead_seconds;
    return failed;
}

time_t time(time_t *into)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into)
        *into = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict into, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    into->tv_sec = now.tv_sec;
    into->tv_usec = now.tv_nsec / 1000;
    return 0;
}
