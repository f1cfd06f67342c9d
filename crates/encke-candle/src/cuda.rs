//! candle's tensors on NVIDIA GPUs: Encke's kernels on candle's memory, ordered with candle's
//! stream.
//!
//! Nothing goes through the host, and the host does not wait. The decision here: results are
//! candle's own memory, allocated in the order of its stream, so candle frees and reuses them like
//! any other; a GPU's kernels are loaded at its first tensor, once for all layers that share
//! settings.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::backend::BackendDevice;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Layout, Storage, Tensor};
use encke::plan::program::Role;
use encke::{
    Builder, CheckpointPolicy, CudaError, CudaKernel, DeviceView, ForeignStream, KernelError, Pass,
    Report, Shape,
};

use crate::error::Error;
use crate::storage::four;

/// The attention with some settings on every GPU used so far.
pub struct GpuAttentions {
    settings: Builder,
    open: Mutex<HashMap<usize, Arc<GpuAttention>>>,
}

pub type GpuAttention = encke::Attention<CudaKernel>;
/// A tensor: candle's storage, and its layout.
type CudaInput<'a> = (&'a CudaStorage, &'a Layout);

impl GpuAttentions {
    pub fn new(settings: Builder) -> GpuAttentions {
        GpuAttentions {
            settings,
            open: Mutex::default(),
        }
    }

    /// The attention on a GPU; the first call loads its kernels.
    pub fn on(&self, number: usize) -> Result<Arc<GpuAttention>, Error> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(attention) = open.get(&number) {
            return Ok(Arc::clone(attention));
        }
        let kernel = CudaKernel::new(number).map_err(refused)?;
        let attention = Arc::new(self.settings.clone().build_on(kernel)?);
        open.insert(number, Arc::clone(&attention));
        Ok(attention)
    }
}

fn refused(error: CudaError) -> Error {
    encke::Error::from(KernelError::from(error)).into()
}

/// The output, the log-sum-exp if it is saved for the backward pass, and the report.
pub fn forward(
    attention: &GpuAttention,
    qkv: [CudaInput<'_>; 3],
) -> candle_core::Result<(CudaStorage, Option<CudaStorage>, Report)> {
    let saves_lse = match attention.checkpoint_policy() {
        CheckpointPolicy::KeepOutput => true,
        CheckpointPolicy::Recompute => false,
        CheckpointPolicy::Offload => {
            return Err(refused(CudaError::Unsupported {
                what: "a checkpoint in a file for tensors that stay on a GPU; use the policy \
                       KeepOutput or Recompute"
                    .into(),
            })
            .into());
        }
    };
    let (out, lse, report) = attend(attention, qkv)?;
    Ok((out, saves_lse.then_some(lse), report))
}

/// Enqueues a forward pass.
fn attend(
    attention: &GpuAttention,
    qkv: [CudaInput<'_>; 3],
) -> candle_core::Result<(CudaStorage, CudaStorage, Report)> {
    let [(q, q_layout), (_, k_layout), _] = qkv;
    let dims = four("q", q_layout.dims())?;
    let [batch, tokens, heads, dim] = dims;
    let kv_heads = four("k", k_layout.dims())?[2];
    let shape = Shape::new(batch, tokens, heads, kv_heads, dim).map_err(encke::Error::from);
    let plan = attention
        .plan_on_gpu(
            shape.map_err(Error::from)?,
            encke_dtype("q", q)?,
            Pass::Forward,
        )
        .map_err(Error::from)?;
    let request = plan.request();
    let cells = [batch, tokens, heads, 1];
    let device = &q.device;
    let mut out = device.zeros_impl(&(&dims).into(), candle_dtype(request.out_dtype()))?;
    let mut lse = device.zeros_impl(&(&cells).into(), candle_dtype(request.dtype.sum()))?;
    let stream = device.cuda_stream();
    let report = {
        let inputs = by_role(["q", "k", "v"], [Role::Q, Role::K, Role::V], qkv, &stream)?;
        let outputs = [
            (Role::Out, writing(&mut out, dims, &stream)?),
            (Role::Lse, writing(&mut lse, cells, &stream)?),
        ];
        enqueue(attention, &stream, Pass::Forward, &inputs, &outputs)?
    };
    Ok((out, lse, report))
}

/// Gradients of q, k and v, from q, k, v, the output and its gradient, and the report. Without a
/// log-sum-exp the forward pass is recomputed.
pub fn backward(
    attention: &GpuAttention,
    tensors: [&Tensor; 5],
    lse: Option<&CudaStorage>,
) -> candle_core::Result<([Tensor; 3], Report)> {
    let names = ["q", "k", "v", "out", "dout"];
    let guards = tensors.map(Tensor::storage_and_layout);
    let mut inputs = Vec::with_capacity(guards.len());
    for (name, (storage, layout)) in names.into_iter().zip(&guards) {
        inputs.push((on_gpu(name, storage)?, *layout));
    }
    let (qkv, device) = ([inputs[0], inputs[1], inputs[2]], &inputs[0].0.device);
    let recomputed = match lse {
        Some(_) => None,
        None => Some(attend(attention, qkv)?),
    };
    let (out, lse) = match (&recomputed, lse) {
        (Some((out, lse, _)), _) => (out, lse),
        (None, Some(lse)) => (inputs[3].0, lse),
        (None, None) => return Err(Error::NothingSaved.into()),
    };
    let [batch, tokens, heads, dim] = four("q", inputs[0].1.dims())?;
    let out_layout = Layout::contiguous((batch, tokens, heads, dim));
    let cells = Layout::contiguous((batch, tokens, heads, 1));
    let out_layout = match recomputed {
        Some(_) => &out_layout,
        None => inputs[3].1,
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
        let all = [q, k, v, (out, out_layout), (lse, &cells), inputs[4]];
        let inputs = by_role(names, roles, all, &stream)?;
        let roles = [Role::Dq, Role::Dk, Role::Dv];
        let mut outputs = Vec::with_capacity(roles.len());
        for ((role, gradient), (_, layout)) in roles.into_iter().zip(&mut gradients).zip(qkv) {
            let dims = four("a gradient", layout.dims())?;
            outputs.push((role, writing(gradient, dims, &stream)?));
        }
        let pass = Pass::Backward { dlse: false };
        enqueue(attention, &stream, pass, &inputs, &outputs)?
    };
    let mut tensors = gradients
        .into_iter()
        .zip(qkv)
        .map(|(gradient, (_, layout))| {
            let storage = Storage::Cuda(gradient);
            Tensor::from_storage(storage, layout.shape().clone(), BackpropOp::none(), false)
        });
    let mut next = || tensors.next().ok_or(Error::NothingSaved);
    Ok(([next()?, next()?, next()?], report))
}

/// Enqueues a pass, ordered with candle's stream. The views were made before, so the stream already
/// waits for the writes of their owners.
fn enqueue(
    attention: &GpuAttention,
    stream: &Arc<CudaStream>,
    pass: Pass,
    inputs: &[(Role, DeviceView<'_>)],
    outputs: &[(Role, DeviceView<'_>)],
) -> Result<Report, Error> {
    let stream = ForeignStream::on(attention.kernel().device(), stream).map_err(refused)?;
    Ok(attention.enqueue(stream, pass, inputs, outputs)?)
}

/// Views of the inputs by role.
fn by_role<'a, const COUNT: usize>(
    names: [&'static str; COUNT],
    roles: [Role; COUNT],
    inputs: [CudaInput<'a>; COUNT],
    stream: &'a Arc<CudaStream>,
) -> Result<Vec<(Role, DeviceView<'a>)>, Error> {
    let all = names.into_iter().zip(roles).zip(inputs);
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
        _ => return Err(wrong_type(tensor, storage)),
    }
    .map_err(refused)
}

fn writing<'a>(
    storage: &'a mut CudaStorage,
    dims: [usize; 4],
    stream: &'a Arc<CudaStream>,
) -> Result<DeviceView<'a>, Error> {
    let wrong = wrong_type("a result", storage);
    match &mut storage.slice {
        CudaStorageSlice::F64(slice) => DeviceView::writing(slice, dims, stream),
        CudaStorageSlice::F32(slice) => DeviceView::writing(slice, dims, stream),
        CudaStorageSlice::BF16(slice) => DeviceView::writing(slice, dims, stream),
        CudaStorageSlice::F16(slice) => DeviceView::writing(slice, dims, stream),
        _ => return Err(wrong),
    }
    .map_err(refused)
}

/// The storage of a tensor on a GPU.
fn on_gpu<'a>(tensor: &'static str, storage: &'a Storage) -> Result<&'a CudaStorage, Error> {
    let (device, q) = match storage {
        Storage::Cuda(storage) => return Ok(storage),
        Storage::Cpu(_) => ("the CPU".to_string(), "a CUDA device".to_string()),
        Storage::Metal(_) => ("a Metal device".to_string(), "a CUDA device".to_string()),
    };
    Err(Error::DeviceMismatch { tensor, device, q })
}

fn wrong_type(tensor: &'static str, storage: &CudaStorage) -> Error {
    let got = candle_core::backend::BackendStorage::dtype(storage);
    Error::Type { tensor, got }
}

fn candle_dtype(dtype: encke::DType) -> DType {
    match dtype {
        encke::DType::F64 => DType::F64,
        encke::DType::F32 => DType::F32,
        encke::DType::Bf16 => DType::BF16,
        encke::DType::F16 => DType::F16,
    }
}

fn encke_dtype(tensor: &'static str, storage: &CudaStorage) -> Result<encke::DType, Error> {
    let got = candle_core::backend::BackendStorage::dtype(storage);
    let mut all = encke::DType::ALL.into_iter();
    all.find(|dtype| candle_dtype(*dtype) == got)
        .ok_or(Error::Type { tensor, got })
}
