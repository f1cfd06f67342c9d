//! Extra terms of finished rows, and the deltas of branches where mixing weights are constants.

use std::sync::Arc;

use cudarc::driver::DeviceRepr;
use encke_core::transport::WireBuffer;
use encke_core::{DType, Pattern, Shape};

use super::cells::{THREADS, blocks};
use super::{KernelValue, LaunchContext, addresses, pointer_arguments, spread};
use crate::allocation::DeviceAllocation;
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::program::Program;

const TEXTS: &[fn() -> String] = &[
    || include_str!("../kernels/element_types.cuh").into(),
    || include_str!("../kernels/warp_rows.cuh").into(),
    || include_str!("../kernels/branches.cu").into(),
];

pub(crate) fn program(dtype: DType) -> Program {
    Program::new("branches", TEXTS).stored(dtype)
}

/// `BranchParams` of the kernels.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct BranchParams {
    count: i64,
    entry: i64,
    dim: i64,
    heads: u64,
    documents: u64,
    count_documents: i32,
    count_heads: i32,
    count_offsets: i32,
    first_slot: i32,
    own_slots: i32,
    slots: i32,
    tokens: i32,
    segment: i32,
    dilation: i32,
}

// SAFETY: plain numbers in C layout, without host pointers.
unsafe impl DeviceRepr for BranchParams {}

/// A branch of a call, with the tables of its kernels.
struct BranchArguments {
    params: BranchParams,
    tables: Vec<Arc<DeviceAllocation>>,
}

impl BranchArguments {
    fn new(
        context: &LaunchContext,
        (pattern, shape): (&Pattern, &Shape),
        branch: usize,
    ) -> Result<BranchArguments> {
        let small = |of: usize, what: &str| {
            i32::try_from(of).map_err(|_| Error::Unsupported {
                what: format!("{of} {what} on a GPU: at most {}", i32::MAX),
            })
        };
        let slots = pattern.delta_slots(shape.heads);
        let all = slots.iter().flatten().map(|(_, slot)| slot + 1).max();
        let own = || slots[branch].iter().map(|(_, slot)| *slot);
        let first_slot = own().min().unwrap_or(0);
        let own_slots = own().max().map_or(0, |last| last + 1 - first_slot);
        let heads = pattern.heads_of(branch, shape.heads);
        let offsets = heads
            .iter()
            .map(|(_, offset)| offset + 1)
            .max()
            .unwrap_or(0);
        let mut of_offsets = vec![-1; offsets * own_slots];
        for ((head, offset), slot) in heads.iter().zip(own()) {
            of_offsets[offset * own_slots + slot - first_slot] = *head as i64;
        }
        let documents = pattern.document_list();
        let starts = documents.map(|all| all.ranges().map(|of| of.start as i64).collect());
        let table = |values| context.tables.get(&context.device, values);
        let heads = table(of_offsets)?;
        let starts = starts.map(table).transpose()?;
        let of = pattern.branches()[branch];
        Ok(BranchArguments {
            params: BranchParams {
                count: (shape.batch * shape.queries * own_slots) as i64,
                entry: (shape.queries * shape.heads) as i64,
                dim: shape.value_dim as i64,
                heads: heads.pointer(),
                documents: starts.as_ref().map_or(0, |table| table.pointer()),
                count_documents: small(documents.map_or(0, |of| of.count()), "documents")?,
                count_heads: small(shape.heads, "heads")?,
                count_offsets: small(offsets, "offsets")?,
                first_slot: small(first_slot, "slots of deltas")?,
                own_slots: small(own_slots, "slots of deltas")?,
                slots: small(all.unwrap_or(0), "slots of deltas")?,
                tokens: small(shape.queries, "tokens")?,
                // Longer ones select the same tokens.
                segment: small(of.segment.min(shape.tokens), "tokens")?,
                dilation: small(of.dilation.min(shape.tokens), "tokens")?,
            },
            tables: [heads].into_iter().chain(starts).collect(),
        })
    }
}

/// Adds terms to finished rows of `dim` elements: `terms` has the logarithms of as many cells as it
/// has elements, and of those after them again.
pub(crate) fn add_terms(
    context: &LaunchContext,
    dim: usize,
    out: &mut Buffer,
    lse: &mut Buffer,
    terms: &Buffer,
) -> Result<()> {
    let dtype = out.dtype();
    check(dtype, &[("lse", lse), ("extra terms", terms)])?;
    let (cells, entry) = (lse.elements() as i64, terms.elements() as i64);
    let read = &**terms.memory()?;
    let targets = [out.writable()?.clone(), lse.writable()?.clone()];
    let writes = targets.each_ref().map(|of| &**of);
    let pointers = addresses(writes.iter().chain(&[read]));
    let mut arguments = pointer_arguments(&pointers);
    let dim = dim as i64;
    arguments.extend([&cells as &dyn KernelValue, &entry, &dim]);
    let launch = ("adding terms", "add_terms", dtype, cells as usize);
    // SAFETY: the arguments of `add_terms`; out has `dim` elements for each cell of lse.
    unsafe { enqueue(context, launch, &[read], &writes, &arguments) }
}

/// What all deltas of a backward pass need.
pub(crate) struct DeltaBuffers {
    pub dout: Buffer,
    pub dlse: Option<Buffer>,
    pub lse: Buffer,
    pub delta: Buffer,
    pub rest: Buffer,
    pub weight: Buffer,
}

impl DeltaBuffers {
    fn check(&self) -> Result<DType> {
        let dtype = self.dout.dtype();
        let all = [
            ("lse", &self.lse),
            ("delta", &self.delta),
            ("the rest of delta", &self.rest),
            ("the weight that is left", &self.weight),
        ];
        check(dtype, &all)?;
        check(
            dtype,
            &self.dlse.iter().map(|of| ("dlse", of)).collect::<Vec<_>>(),
        )?;
        Ok(dtype)
    }

    /// Begins with the delta of the whole output.
    pub fn start(&mut self, context: &LaunchContext, dim: usize, out: &Buffer) -> Result<()> {
        let dtype = self.check()?;
        let cells = self.lse.elements();
        let mut reads = vec![&**out.memory()?, &**self.dout.memory()?];
        let dlse = self.dlse.as_ref().map(Buffer::memory).transpose()?;
        let targets = [
            self.rest.writable()?.clone(),
            self.weight.writable()?.clone(),
        ];
        let writes = targets.each_ref().map(|of| &**of);
        let mut pointers = addresses(&reads);
        pointers.push(dlse.map_or(0, |of| of.pointer()));
        pointers.extend(addresses(&writes));
        reads.extend(dlse.map(|of| &**of));
        let mut arguments = pointer_arguments(&pointers);
        let (count, dim) = (cells as i64, dim as i64);
        arguments.extend([&count as &dyn KernelValue, &dim]);
        let launch = ("deltas of branches", "start_rest", dtype, cells);
        // SAFETY: the arguments of `start_rest`; every buffer has as many cells as lse.
        unsafe { enqueue(context, launch, &reads, &writes, &arguments) }
    }

    /// The delta of a branch, from its own out and lse and the terms that its softmax has beside
    /// its keys; without them, from what the other branches have left.
    pub fn add(
        &mut self,
        context: &LaunchContext,
        call: (&Pattern, &Shape),
        branch: usize,
        own: Option<(&Buffer, &Buffer, Option<&Buffer>)>,
    ) -> Result<()> {
        let dtype = self.check()?;
        let BranchArguments { params, tables } = BranchArguments::new(context, call, branch)?;
        let targets = [
            self.delta.writable()?.clone(),
            self.rest.writable()?.clone(),
            self.weight.writable()?.clone(),
        ];
        let cells = params.count as usize;
        let tables = tables.iter().map(|of| &**of);
        let Some((out, own_lse, terms)) = own else {
            let [delta, rest, weight] = targets.each_ref().map(|of| &**of);
            let pointers = addresses(&[rest, weight, delta]);
            let mut arguments = pointer_arguments(&pointers);
            arguments.push(&params);
            let reads: Vec<_> = [rest, weight].into_iter().chain(tables).collect();
            let launch = ("deltas of branches", "delta_of_rest", dtype, cells);
            // SAFETY: the arguments of `delta_of_rest`, whose buffers have the cells of the call.
            return unsafe { enqueue(context, launch, &reads, &[delta], &arguments) };
        };
        check(dtype, &[("the lse of a branch", own_lse)])?;
        let terms = terms.map(Buffer::memory).transpose()?;
        let dlse = self.dlse.as_ref().map(Buffer::memory).transpose()?;
        let [out, own_lse, dout, lse] = [
            out.memory()?,
            own_lse.memory()?,
            self.dout.memory()?,
            self.lse.memory()?,
        ];
        let writes = targets.each_ref().map(|of| &**of);
        let optional = |of: Option<&Arc<DeviceAllocation>>| of.map_or(0, |of| of.pointer());
        let mut pointers = vec![
            out.pointer(),
            own_lse.pointer(),
            optional(terms),
            dout.pointer(),
            optional(dlse),
            lse.pointer(),
        ];
        pointers.extend(addresses(&writes));
        let mut arguments = pointer_arguments(&pointers);
        arguments.push(&params);
        let mut reads = vec![&**out, &**own_lse, &**dout, &**lse];
        reads.extend(terms.into_iter().chain(dlse).map(|of| &**of).chain(tables));
        let launch = ("deltas of branches", "delta_of_branch", dtype, cells);
        // SAFETY: the arguments of `delta_of_branch`, whose buffers have the cells of the call.
        unsafe { enqueue(context, launch, &reads, &writes, &arguments) }
    }
}

/// Refuses buffers of another type than that of sums.
fn check(dtype: DType, buffers: &[(&str, &Buffer)]) -> Result<()> {
    let mut buffers = buffers.iter();
    buffers.try_for_each(|(what, buffer)| buffer.check_dtype(what, dtype.sum()))
}

/// Launches a kernel of `branches.cu` with a warp for each cell at most.
///
/// # Safety
/// As for [`LaunchContext::launch`].
unsafe fn enqueue(
    context: &LaunchContext,
    (what, kernel, dtype, cells): (&str, &'static str, DType, usize),
    reads: &[&DeviceAllocation],
    writes: &[&DeviceAllocation],
    arguments: &[&dyn KernelValue],
) -> Result<()> {
    let device = &context.device;
    let function = device.function(&program(dtype), kernel, 0)?;
    let shape = spread(device, blocks(cells), THREADS);
    // SAFETY: passed on to the caller.
    unsafe { context.launch(what, (&function, shape), reads, writes, arguments) }
}
