//! Huge pages for large buffers, and pages that go back to the system, on Linux.
//!
//! A tensor of 128 MiB is 32768 small pages, each with a page fault at its first access, and each
//! row of a dilated branch lies in a page of its own.

/// Bytes of a huge page, on x86-64 and most other architectures.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// Asks for huge pages for memory that has not been accessed yet. Does nothing for less than two
/// huge pages, and ignores a refusal.
#[cfg(target_os = "linux")]
pub(crate) fn advise_huge_pages(memory: &mut [u8]) {
    let skip = memory.as_ptr().align_offset(HUGE_PAGE);
    let whole = memory.len().saturating_sub(skip) / HUGE_PAGE * HUGE_PAGE;
    if whole < 2 * HUGE_PAGE {
        return;
    }
    let first = memory[skip..].as_mut_ptr();
    // SAFETY: the range lies inside `memory`, and the advice changes no byte of it.
    unsafe { libc::madvise(first.cast(), whole, libc::MADV_HUGEPAGE) };
}

/// Other systems have no such advice.
#[cfg(not(target_os = "linux"))]
pub(crate) fn advise_huge_pages(_: &mut [u8]) {}

/// Makes the allocator return every freed buffer of 64 KiB or more to the system at once, for
/// programs that promise a limit of their resident memory. glibc would otherwise keep freed buffers
/// of up to 32 MiB once it has seen them, and lay others beside them. Costs page faults.
pub fn return_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt changes settings of the allocator, under its own lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 64 << 10);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 << 10);
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
}

#[cfg(test)]
mod tests {
    use super::advise_huge_pages;

    #[test]
    fn advice_changes_no_byte() {
        for bytes in [0, 1, 4096, (4 << 20) - 1, (9 << 20) + 17] {
            let mut memory = vec![0u8; bytes + 64];
            for from in [0, 1, 64] {
                let part = &mut memory[from..from + bytes];
                part.iter_mut().step_by(4096).for_each(|byte| *byte = 7);
                advise_huge_pages(part);
                assert!(part.iter().step_by(4096).all(|&byte| byte == 7), "{bytes}");
                part.fill(0);
            }
        }
    }
}
