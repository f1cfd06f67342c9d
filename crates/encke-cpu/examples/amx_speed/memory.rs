//! Memory for tiles.

/// Memory that begins at a page.
pub struct Memory(Vec<Page>);

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl Memory {
    /// So many pages of bf16 between 1 and 2: zeros would be multiplied faster.
    pub fn new(pages: usize) -> Memory {
        let byte = |i: usize| {
            if i % 2 == 0 {
                0x80 | (i * 37) as u8
            } else {
                0x3f
            }
        };
        Memory(vec![Page(std::array::from_fn(byte)); pages])
    }

    /// Where it begins.
    pub fn at(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}
