//! candle's tensors on NVIDIA GPUs: Encke's kernels on candle's memory, on behalf of candle's stream.
//!
//! Nothing goes through the host and nothing waits there. The decision here: results are candle's own
//! memory, allocated in the order of its stream, so candle frees and reuses them as it does any other;
//! kernels are opened when the first tensor of a GPU comes, once for all layers that share settings.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Storage, Tensor};
use encke::plan::program::Role;
use encke::{
    Builder, CheckpointPolicy, CudaError, CudaKernel, DeviceView, ForeignStream, KernelError, Pass,
    Report, Shape,
};

use crate::attention::{Attention, words};
use crate::error::Error;
use crate::storage::four;

/// The attention with some settings on every GPU that tensors came from.
pub struct Gpus {
    settings: Builder,
    open: Mutex<HashMap<usize, Arc<OnGpu>>>,
}

type OnGpu = encke::Attention<CudaKernel>;
/// Memory of candle and how a tensor lies in it.
type Given<'a> = (&'a CudaStorage, &'a Layout);

impl Gpus {
    pub fn new(settings: Builder) -> Gpus {
        Gpus {
            settings,
            open: Mutex::default(),
        }
    }

    /// The attention on a GPU; the first call opens it.
    fn on(&self, number: usize) -> Result<Arc<OnGpu>, Error> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = open.get(&number) {
            return Ok(Arc::clone(known));
        }
        let kernel = CudaKernel::new(number).map_err(refused)?;
        let attention = Arc::new(self.settings.clone().build_on(kernel)?);
        open.insert(number, Arc::clone(&attention));
        Ok(attention)
    }
}

/// The attention of these settings where candle has its tensors.
fn on(settings: &Attention, device: &CudaDevice) -> Result<Arc<OnGpu>, Error> {
    let place = device.location();
    match (settings.gpus(), place) {
        (Some(gpus), candle_core::DeviceLocation::Cuda { gpu_id }) => gpus.on(gpu_id),
        _ => Err(Error::HostRing {
            device: words(place),
        }),
    }
}

fn refused(error: CudaError) -> Error {
    encke::Error::from(KernelError::from(error)).into()
}

/// The output, and the log-sum-exp where it is kept for the backward pass.
pub fn forward(
    settings: &Attention,
    qkv: [Given<'_>; 3],
) -> candle_core::Result<(CudaStorage, Option<CudaStorage>)> {
    let attention = on(settings, &qkv[0].0.device)?;
    let keeps = match attention.checkpoint_policy() {
        CheckpointPolicy::KeepOutput => true,
        CheckpointPolicy::Recompute => false,
        CheckpointPolicy::Offload => {
            return Err(refused(CudaError::Unsupported {
                what: "a checkpoint in a file for tensors that stay on a GPU; keep the output, or \
                       compute it again"
                    .into(),
            })
            .into());
        }
    };
    let (out, lse, report) = attend(&attention, qkv)?;
    settings.note(|reports| reports.forward = Some(Arc::new(report)));
    Ok((out, keeps.then_some(lse)))
}

/// Enqueues a forward pass.
fn attend(
    attention: &OnGpu,
    qkv: [Given<'_>; 3],
) -> candle_core::Result<(CudaStorage, CudaStorage, Report)> {
    let [(q, q_layout), (_, k_layout), _] = qkv;
    let dims = four("q", q_layout.dims())?;
    let [batch, tokens, heads, dim] = dims;
    let kv_heads = four("k", k_layout.dims())?[2];
    let shape = Shape::new(batch, tokens, heads, kv_heads, dim).map_err(encke::Error::from);
    let plan = attention
        .plan_on_gpu(
            shape.map_err(Error::from)?,
            number_type("q", q)?,
            Pass::Forward,
        )
        .map_err(Error::from)?;
    let request = plan.request();
    let cells = [batch, tokens, heads, 1];
    let device = &q.device;
    let mut out = device.zeros_impl(&(&dims).into(), stored(request.out_dtype()))?;
    let mut lse = device.zeros_impl(&(&cells).into(), stored(request.dtype.sum()))?;
    let stream = device.cuda_stream();
    let report = {
        let inputs = named(["q", "k", "v"], [Role::Q, Role::K, Role::V], qkv, &stream)?;
        let outputs = [
            (Role::Out, writing(&mut out, dims, &stream)?),
            (Role::Lse, writing(&mut lse, cells, &stream)?),
        ];
        enqueue(attention, &stream, Pass::Forward, &inputs, &outputs)?
    };
    Ok((out, lse, report))
}

/// Gradients of q, k and v, from these, the output and its gradient; without a log-sum-exp the forward
/// pass is computed again.
pub fn backward(
    settings: &Attention,
    tensors: [&Tensor; 5],
    lse: Option<&CudaStorage>,
) -> candle_core::Result<[Tensor; 3]> {
    let names = ["q", "k", "v", "out", "dout"];
    let held = tensors.map(Tensor::storage_and_layout);
    let mut given = Vec::with_capacity(held.len());
    for (name, (storage, layout)) in names.into_iter().zip(&held) {
        given.push((on_gpu(name, storage)?, *layout));
    }
    let (qkv, device) = ([given[0], given[1], given[2]], &given[0].0.device);
    let attention = on(settings, device)?;
    let again = match lse {
        Some(_) => None,
        None => Some(attend(&attention, qkv)?),
    };
    let (out, lse) = match (&again, lse) {
        (Some((out, lse, _)), _) => (out, lse),
        (None, Some(lse)) => (given[3].0, lse),
        (None, None) => return Err(Error::NothingKept.into()),
    };
    let [batch, tokens, heads, dim] = four("q", given[0].1.dims())?;
    let out_layout = Layout::contiguous((batch, tokens, heads, dim));
    let cells = Layout::contiguous((batch, tokens, heads, 1));
    let out_layout = match again {
        Some(_) => &out_layout,
        None => given[3].1,
    };

    let mut gradients = Vec::with_capacity(qkv.len());
    for (of, layout) in qkv {
        let dtype = candle_core::backend::BackendStorage::dtype(of);
        gradients.push(device.zeros_impl(layout.shape(), dtype)?);
    }
    let stream = device.cuda_stream();
    let report = {
        let names = ["q", "k", "v", "out", "lse", "dout"];
        let roles = [Role::Q, Role::K, Role::V, Role::Out, Role::Lse, Role::Dout];
        let [q, k, v] = qkv;
        let all = [q, k, v, (out, out_layout), (lse, &cells), given[4]];
        let inputs = named(names, roles, all, &stream)?;
        let roles = [Role::Dq, Role::Dk, Role::Dv];
        let mut outputs = Vec::with_capacity(roles.len());
        for ((role, gradient), (_, layout)) in roles.into_iter().zip(&mut gradients).zip(qkv) {
            let dims = four("a gradient", layout.dims())?;
            outputs.push((role, writing(gradient, dims, &stream)?));
        }
        let pass = Pass::Backward { dlse: false };
        enqueue(&attention, &stream, pass, &inputs, &outputs)?
    };
    settings.note(|reports| reports.backward = Some(Arc::new(report)));
    let mut tensors = gradients
        .into_iter()
        .zip(qkv)
        .map(|(gradient, (_, layout))| {
            let storage = Storage::Cuda(gradient);
            Tensor::from_storage(storage, layout.shape().clone(), BackpropOp::none(), false)
        });
    let mut next = || tensors.next().ok_or(Error::NothingKept);
    Ok([next()?, next()?, next()?])
}

/// Enqueues a pass on behalf of candle's stream. What is lent was lent before: its owner's waits are on
/// the stream already.
fn enqueue(
    attention: &OnGpu,
    stream: &Arc<CudaStream>,
    pass: Pass,
    inputs: &[(Role, DeviceView<'_>)],
    outputs: &[(Role, DeviceView<'_>)],
) -> Result<Report, Error> {
    let guest = ForeignStream::on(attention.kernel().device(), stream).map_err(refused)?;
    Ok(attention.enqueue(guest, pass, inputs, outputs)?)
}

/// Tensors to be read, by role.
fn named<'a, const COUNT: usize>(
    names: [&'static str; COUNT],
    roles: [Role; COUNT],
    given: [Given<'a>; COUNT],
    stream: &'a Arc<CudaStream>,
) -> Result<Vec<(Role, DeviceView<'a>)>, Error> {
    let all = names.into_iter().zip(roles).zip(given);
    all.map(|((name, role), (storage, layout))| Ok((role, reading(name, storage, layout, stream)?)))
        .collect()
}

fn reading<'a>(
    tensor: &'static str,
    storage: &'a CudaStorage,
    layout: &Layout,
    stream: &'a Arc<CudaStream>,
) -> Result<DeviceView<'a>, Error> {
    let (dims, strides) = (four(tensor, layout.dims())?, four(tensor, layout.stride())?);
    let first = layout.start_offset();
    match &storage.slice {
        CudaStorageSlice::F64(slice) => DeviceView::reading(slice, first, dims, strides, stream),
        CudaStorageSlice::F32(slice) => DeviceView::reading(slice, first, dims, strides, stream),
        CudaStorageSlice::BF16(slice) => DeviceView::reading(slice, first, dims, strides, stream),
        CudaStorageSlice::F16(slice) => DeviceView::reading(slice, first, dims, strides, stream),
        _ => return Err(unknown(tensor, storage)),
    }
    .map_err(refused)
}

fn writing<'a>(
    storage: &'a mut CudaStorage,
    dims: [usize; 4],
    stream: &'a Arc<CudaStream>,
) -> Result<DeviceView<'a>, Error> {
    let wrong = unknown("a result", storage);
    match &mut storage.slice {
        CudaStorageSlice::F64(slice) => DeviceView::writing(slice, dims, stream),
        CudaStorageSlice::F32(slice) => DeviceView::writing(slice, dims, stream),
        CudaStorageSlice::BF16(slice) => DeviceView::writing(slice, dims, stream),
        CudaStorageSlice::F16(slice) => DeviceView::writing(slice, dims, stream),
        _ => return Err(wrong),
    }
    .map_err(refused)
}

/// The memory of a tensor on a GPU.
fn on_gpu<'a>(tensor: &'static str, storage: &'a Storage) -> Result<&'a CudaStorage, Error> {
    let (device, q) = match storage {
        Storage::Cuda(storage) => return Ok(storage),
        Storage::Cpu(_) => ("the CPU".to_string(), "a CUDA device".to_string()),
        Storage::Metal(_) => ("a Metal device".to_string(), "a CUDA device".to_string()),
    };
    Err(Error::Apart { tensor, device, q })
}

fn unknown(tensor: &'static str, storage: &CudaStorage) -> Error {
    let got = candle_core::backend::BackendStorage::dtype(storage);
    Error::Type { tensor, got }
}

/// candle's name of a type.
fn stored(dtype: encke::DType) -> DType {
    match dtype {
        encke::DType::F64 => DType::F64,
        encke::DType::F32 => DType::F32,
        encke::DType::Bf16 => DType::BF16,
        encke::DType::F16 => DType::F16,
    }
}

/// Encke's name of a type.
fn number_type(tensor: &'static str, storage: &CudaStorage) -> Result<encke::DType, Error> {
    let got = candle_core::backend::BackendStorage::dtype(storage);
    let known = encke::DType::ALL.into_iter();
    let known = known.map(|dtype| (dtype, stored(dtype)));
    let found = known.into_iter().find(|(_, theirs)| *theirs == got);
    found
        .map(|(dtype, _)| dtype)
        .ok_or(Error::Type { tensor, got })
}
