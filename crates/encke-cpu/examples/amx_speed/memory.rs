//! Memory for tiles.

/// Memory that begins at a page.
pub struct TileMemory(Vec<Page>);

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

impl TileMemory {
    /// So many pages of bf16 between 1 and 2: zeros would be multiplied faster.
    pub fn new(pages: usize) -> TileMemory {
        let byte = |i: usize| [0x80 | (i * 37) as u8, 0x3f][i % 2];
        TileMemory(vec![Page(std::array::from_fn(byte)); pages])
    }

    /// Where it begins.
    pub fn at(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}
