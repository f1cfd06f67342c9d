//! Whether this process may use matrix tiles.
//!
//! Four things must hold: the processor has tiles for bf16, the operating system saves them, Linux
//! has granted them to this process (they are off until asked for), and the vector instructions of
//! the softmax are there. The standard library can ask only for the last one on a stable compiler.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

/// Whether the tile kernels run here; asks the operating system once per process.
pub(crate) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| vectors() && tiles() && saved() && granted())
}

/// Whether the vector instructions are there that packing and softmax are written in.
pub(crate) fn vectors() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Whether the processor has tiles (bit 24) and multiplies bf16 with them (bit 22).
fn tiles() -> bool {
    const BOTH: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BOTH == BOTH
}

/// Whether the operating system saves tile configuration (bit 17) and tile data (bit 18).
fn saved() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const BOTH: u32 = 1 << 17 | 1 << 18;
    if __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    let enabled: u32;
    // SAFETY: OSXSAVE says that the instruction exists; it only writes eax and edx.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") enabled, out("edx") _, options(nomem, nostack));
    }
    enabled & BOTH == BOTH
}

/// Asks Linux for tile data: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). Threads that are
/// there already and those to come are all granted.
#[cfg(target_os = "linux")]
fn granted() -> bool {
    const SYS_ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XFEATURE_XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: this system call reads two numbers and no memory of ours; the kernel overwrites rcx
    // and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

/// Elsewhere nobody has shown that tiles are usable.
#[cfg(not(target_os = "linux"))]
fn granted() -> bool {
    false
}
