//! Memory for tiles.

/// Memory that begins at a page.
pub struct Memory(Vec<Page>);

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl Memory {
    /// So many pages of zeros.
    pub fn new(pages: usize) -> Memory {
        Memory(vec![Page([0; 4096]); pages])
    }

    /// Where it begins.
    pub fn at(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}
