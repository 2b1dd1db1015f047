# Alarms: a descriptor that becomes readable at a time (timerfd_create(2)). A thread that sleeps on it
# is not woken when that time is set.

cdef extern from "<sys/timerfd.h>" nogil:
    enum:
        TFD_NONBLOCK
        TFD_CLOEXEC
    struct itimerspec:
        timespec it_interval
        timespec it_value
    int timerfd_create(int clock, int flags)
    int timerfd_settime(int fd, int flags, const itimerspec* when, itimerspec* before)

cdef extern from "<time.h>" nogil:
    enum:
        CLOCK_MONOTONIC


cdef class Alarm:
    cdef public int fd

    def __init__(self):
        self.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
        if self.fd < 0:
            PyErr_SetFromErrno(OSError)

    def set(self, int64_t delay_ns):
        self.arm(delay_ns if delay_ns > 0 else 1)

    def cancel(self):
        self.arm(0)

    cdef int arm(self, int64_t delay_ns) except -1:
        cdef itimerspec when
        memset(&when, 0, sizeof(when))
        when.it_value.tv_sec = delay_ns // 1000000000
        when.it_value.tv_nsec = delay_ns % 1000000000
        if self.fd >= 0 and timerfd_settime(self.fd, 0, &when, NULL) < 0:
            PyErr_SetFromErrno(OSError)
        return 0


def new_alarm():
    return Alarm()
