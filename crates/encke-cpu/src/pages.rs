//! Large memory in large pages, where the system gives them to those who ask.
//!
//! A tensor of 128 MiB is 32768 small pages, each of which interrupts whoever touches it first; and
//! rows of a dilated branch lie in a page each.

/// A large page, of x86-64 as of most.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;

/// Asks for large pages for memory that nobody has touched yet. Little memory is left as it is, and a
/// system that refuses, too.
#[cfg(target_os = "linux")]
pub(crate) fn advise_huge_pages(memory: &mut [u8]) {
    let skip = memory.as_ptr().align_offset(HUGE_PAGE);
    let whole = memory.len().saturating_sub(skip) / HUGE_PAGE * HUGE_PAGE;
    if whole < 2 * HUGE_PAGE {
        return;
    }
    let first = memory[skip..].as_mut_ptr();
    // SAFETY: the range lies inside memory that is ours alone, and advice changes no byte of it.
    unsafe { libc::madvise(first.cast(), whole, libc::MADV_HUGEPAGE) };
}

/// Elsewhere pages are as they are.
#[cfg(not(target_os = "linux"))]
pub(crate) fn advise_huge_pages(_: &mut [u8]) {}

#[cfg(test)]
mod tests {
    use super::advise_huge_pages;

    #[test]
    fn asking_changes_no_byte() {
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
