//! Detection of matrix tiles that this process may use.
//!
//! Four conditions must hold: the processor has tiles for bf16, the operating system saves them,
//! Linux has granted them to this process (a process must request them), and the processor has the
//! vector instructions of the softmax. On a stable compiler the standard library detects only the
//! last one.

use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::sync::OnceLock;

/// Whether the tile kernels run here; queries the operating system once per process.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE
        .get_or_init(|| has_avx512() && cpu_has_tiles() && os_saves_tiles() && request_permission())
}

/// Whether the processor has the vector instructions of packing and softmax.
pub fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Whether the processor has tiles (bit 24) and multiplies bf16 with them (bit 22).
fn cpu_has_tiles() -> bool {
    const BOTH: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BOTH == BOTH
}

/// Whether the operating system saves tile configuration (bit 17) and tile data (bit 18).
fn os_saves_tiles() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const BOTH: u64 = 1 << 17 | 1 << 18;
    if __cpuid(1).ecx & OSXSAVE == 0 {
        return false;
    }
    // SAFETY: OSXSAVE tells that the instruction exists; it reads no memory.
    let enabled = unsafe { _xgetbv(0) };
    enabled & BOTH == BOTH
}

/// Requests tile data from Linux: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA). The
/// permission covers all existing and future threads of the process.
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: this system call reads its two arguments and no memory.
    let result = unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        )
    };
    result == 0
}

/// Tiles on other systems are not supported: they have not been tested.
#[cfg(not(target_os = "linux"))]
fn request_permission() -> bool {
    false
}
