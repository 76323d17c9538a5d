// Loaded into each rank of a program in the sandbox (sandbox.py), before its main. From then on the kernel
// lets the rank start no program and no process: seccomp, see the manual's seccomp(2). Threads go on.
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>

namespace {

#ifdef __x86_64__
constexpr unsigned machine = AUDIT_ARCH_X86_64;
#else
constexpr unsigned machine = AUDIT_ARCH_AARCH64;
#endif

// The result of a system call, if the accumulator has its number. Otherwise the filter goes on behind it.
#define RESULT_OF(call, result) \
  BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1), BPF_STMT(BPF_RET | BPF_K, result)

__attribute__((constructor)) void forbid_programs() {
  constexpr unsigned refused = SECCOMP_RET_ERRNO | EPERM;
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, arch)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, machine, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),  // the numbers of another machine
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
#ifdef __x86_64__
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1),  // those of x32
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
      RESULT_OF(SYS_fork, refused),
      RESULT_OF(SYS_vfork, refused),
#endif
      RESULT_OF(SYS_execve, refused),
      RESULT_OF(SYS_execveat, refused),
      RESULT_OF(SYS_ptrace, refused),
      RESULT_OF(SYS_clone3, SECCOMP_RET_ERRNO | ENOSYS),  // the C library then takes clone
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[0])),
      BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, refused),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {sizeof(filter) / sizeof(filter[0]), filter};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    std::_Exit(99);
}

}  // namespace
