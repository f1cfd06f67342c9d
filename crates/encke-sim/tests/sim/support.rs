//! Both passes of a random configuration, as any driver of ranks can be asked for them.

use std::sync::Arc;

use encke_core::conformance::{Configuration, Tensors};
use encke_core::plan::program::Role;
use encke_core::plan::{Pass, Plan, Request};
use encke_core::{MixingGradient, Mode, OffsetRule, Pattern, Tensor};
use encke_ring::call;

/// A plan with tensors for it.
pub struct Call {
    pub plan: Arc<Plan>,
    pub inputs: Vec<(Role, Tensor)>,
}

impl Call {
    /// One of the two passes of a configuration. What a backward pass is given of the forward
    /// pass is random too: no driver can tell.
    pub fn new(configuration: &Configuration, backward: bool) -> Call {
        let pass = match backward {
            true => Pass::Backward { dlse: true },
            false => Pass::Forward,
        };
        let request = Request {
            pass,
            ..configuration.request.clone()
        };
        let dtype = request.dtype;
        let plan = Arc::new(Plan::new(request).expect("a random configuration is legal"));
        let shape = configuration.request.shape;
        let inputs = call::inputs(&plan).into_iter().enumerate();
        let inputs = inputs.map(|(i, (role, _, [_, _, heads, dim]))| {
            let shape = encke_core::Shape {
                heads,
                kv_heads: heads,
                dim,
                ..shape
            };
            let wide = Tensors::random(&shape, configuration.seed + i as u64).q;
            let dtype = if role == Role::Lse || role == Role::Dlse {
                dtype.sum()
            } else {
                dtype
            };
            let tensor = Tensor::from_f64(dtype, wide.dims(), &wide.to_f64());
            (role, tensor.expect("sizes agree"))
        });
        Call {
            inputs: inputs.collect(),
            plan,
        }
    }

    pub fn views(&self) -> Vec<(Role, encke_core::View<'_>)> {
        let inputs = self.inputs.iter();
        inputs
            .map(|(role, tensor)| (*role, tensor.view()))
            .collect()
    }
}

/// The configuration with branches that keep slots of their own, as detached gradients and fkodom
/// have it, where its mode has any.
pub fn with_slots(configuration: &Configuration) -> Configuration {
    let mut configuration = configuration.clone();
    let pattern = &configuration.request.pattern;
    let segments: Vec<usize> = pattern.branches().iter().map(|b| b.segment).collect();
    let dilations: Vec<usize> = pattern.branches().iter().map(|b| b.dilation).collect();
    let mode = Mode::Mix {
        offsets: OffsetRule::HeadMod,
        gradient: MixingGradient::Detached,
    };
    let causal = pattern.is_causal();
    let detached = Pattern::dilated(&segments, &dilations, mode).expect("sizes are positive");
    configuration.request.pattern = detached.causal(causal);
    configuration
}

/// The bits of outputs.
pub fn bits(tensors: &[(Role, Tensor)]) -> Vec<(Role, Vec<u8>)> {
    let bytes = |tensor: &Tensor| tensor.data().bytes().to_vec();
    let each = tensors.iter().map(|(role, tensor)| (*role, bytes(tensor)));
    each.collect()
}
