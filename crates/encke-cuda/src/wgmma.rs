//! The text of wgmma wrappers: one inline function for each shape.
//!
//! The instruction lists every register of its accumulator, so the wrappers are generated; kernels
//! call them by name. The shapes that a kernel needs are listed with its variants, not here.

use std::fmt::Write;

/// One `wgmma.m64nNk16` with f32 accumulators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wgmma {
    /// Columns of the product: a multiple of 8 up to 256.
    pub n: usize,
    /// Whether operand A comes from registers rather than from shared memory.
    pub registers: bool,
    /// Whether operand A is MN-major in shared memory.
    pub transpose_a: bool,
    /// Whether operand B is MN-major.
    pub transpose_b: bool,
    /// Whether operand A is negated.
    pub negate: bool,
}

impl Wgmma {
    /// Both operands in shared memory, K-major.
    pub(crate) fn shared(n: usize) -> Wgmma {
        Wgmma {
            n,
            registers: false,
            transpose_a: false,
            transpose_b: false,
            negate: false,
        }
    }

    /// Operand A in registers.
    pub(crate) fn registers(n: usize) -> Wgmma {
        Wgmma {
            registers: true,
            ..Wgmma::shared(n)
        }
    }

    /// The function's name, such as `wgmma_rs_tb_n128`.
    pub(crate) fn name(&self) -> String {
        let mut name = String::from(if self.registers {
            "wgmma_rs"
        } else {
            "wgmma_ss"
        });
        let suffixes = [
            (self.transpose_a, "_ta"),
            (self.transpose_b, "_tb"),
            (self.negate, "_neg"),
        ];
        name.extend(
            suffixes
                .iter()
                .filter(|(on, _)| *on)
                .map(|(_, suffix)| *suffix),
        );
        name + &format!("_n{}", self.n)
    }

    /// The function's text. The operand type is the macro ELEMENT of arithmetic.cuh.
    pub(crate) fn text(&self) -> String {
        let sums = self.n / 2;
        let list = |from: usize, count: usize| {
            let each: Vec<String> = (from..from + count).map(|i| format!("%{i}")).collect();
            each.join(",")
        };
        let outputs: Vec<String> = (0..sums).map(|i| format!("\"+f\"(d[{i}])")).collect();
        let (parameters, left, inputs, b) = if self.registers {
            let left = format!("{{{}}}", list(sums, 4));
            let inputs = "\"r\"(a0), \"r\"(a1), \"r\"(a2), \"r\"(a3)";
            ("u32 a0, u32 a1, u32 a2, u32 a3", left, inputs, sums + 4)
        } else {
            ("u64 a", format!("%{sums}"), "\"l\"(a)", sums + 1)
        };
        let sign = if self.negate { -1 } else { 1 };
        let mut flags = format!("p, {sign}, 1");
        if !self.registers {
            let _ = write!(flags, ", {}", u8::from(self.transpose_a));
        }
        let _ = write!(flags, ", {}", u8::from(self.transpose_b));
        format!(
            "DEV void {name}(float (&d)[{sums}], {parameters}, u64 b, int keep) {{\n  \
             asm volatile(\"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{keep}, 0;\\n\"\n    \
             \"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.\" ELEMENT \".\" ELEMENT \" \
             {{{sums_list}}}, {left}, %{b}, {flags};\\n}}\\n\"\n    \
             : {outputs} : {inputs}, \"l\"(b), \"r\"(keep));\n}}\n",
            name = self.name(),
            keep = b + 1,
            n = self.n,
            sums_list = list(0, sums),
            outputs = outputs.join(", "),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::Wgmma;

    #[test]
    fn a_wrapper_lists_every_register_once() {
        let both = Wgmma::shared(16);
        assert_eq!(both.name(), "wgmma_ss_n16");
        let text = both.text();
        assert!(
            text.contains("{%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 0, 0;"),
            "{text}"
        );
        assert!(text.contains("setp.ne.b32 p, %10, 0;"), "{text}");
        let left = Wgmma {
            transpose_b: true,
            negate: true,
            ..Wgmma::registers(8)
        };
        assert_eq!(left.name(), "wgmma_rs_tb_neg_n8");
        let text = left.text();
        assert!(
            text.contains("{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, -1, 1, 1;"),
            "{text}"
        );
    }
}
