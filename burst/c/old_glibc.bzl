"""old_glibc: makes a library link with the old versions of glibc's functions.

From glibc 2.34 on, functions of libpthread, libdl and librt are in libc, with a new version. The linker takes the
version that it finds first. So stand-ins for the old libraries come first, which have the old version and no code.
When the library is loaded, glibc of any age finds the functions: it keeps their old versions, too.
"""

_FUNCTIONS = {
    "libdl.so.2": {
        "GLIBC_2.2.5": [
            "dlclose",
            "dlerror",
            "dlopen",
            "dlsym",
            "dlvsym",
        ],
        "GLIBC_2.3.4": [
            "dlmopen",
        ],
    },
    "libpthread.so.0": {
        "GLIBC_2.2.5": [
            "pthread_condattr_setpshared",
            "pthread_create",
            "pthread_detach",
            "pthread_getspecific",
            "pthread_join",
            "pthread_key_create",
            "pthread_key_delete",
            "pthread_kill",
            "pthread_mutex_timedlock",
            "pthread_mutex_trylock",
            "pthread_mutexattr_destroy",
            "pthread_mutexattr_init",
            "pthread_mutexattr_setpshared",
            "pthread_mutexattr_settype",
            "pthread_once",
            "pthread_rwlock_destroy",
            "pthread_rwlock_init",
            "pthread_rwlock_rdlock",
            "pthread_rwlock_timedrdlock",
            "pthread_rwlock_timedwrlock",
            "pthread_rwlock_tryrdlock",
            "pthread_rwlock_trywrlock",
            "pthread_rwlock_unlock",
            "pthread_rwlock_wrlock",
            "pthread_rwlockattr_destroy",
            "pthread_rwlockattr_init",
            "pthread_rwlockattr_setpshared",
            "pthread_setspecific",
            "pthread_spin_destroy",
            "pthread_spin_init",
            "pthread_spin_lock",
            "pthread_spin_trylock",
            "pthread_spin_unlock",
            "sem_destroy",
            "sem_init",
            "sem_post",
            "sem_timedwait",
            "sem_trywait",
            "sem_wait",
        ],
    },
    "librt.so.1": {
        "GLIBC_2.2.5": [
            "shm_open",
            "shm_unlink",
        ],
    },
}

def old_glibc(name):
    """The files name/libdl.so.2, name/libpthread.so.0 and name/librt.so.1 for a linker."""
    for library, versions in _FUNCTIONS.items():
        code = ["void %s(void) {}" % function for functions in versions.values() for function in functions]
        script = ["%s { %s; };" % (version, "; ".join(functions)) for version, functions in versions.items()]
        native.genrule(
            name = "%s_%s" % (name, library),
            outs = ["%s/%s" % (name, library)],
            cmd = " && ".join([
                "echo '%s' >$@.c" % " ".join(code),
                "echo '%s' >$@.lds" % " ".join(script),
                "$(CC) -w -fno-builtin -shared -nostdlib -Wl,-soname,%s -Wl,--version-script,$@.lds -o $@ $@.c" % library,
            ]),
            toolchains = ["@rules_cc//cc:current_cc_toolchain"],
        )

OLD_GLIBC = sorted(_FUNCTIONS)
