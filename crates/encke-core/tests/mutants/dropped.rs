//! Faults in what is dropped, and in where values are.

use encke_core::Data;
use encke_core::dtype::Slice;
use encke_core::job::Job;
use encke_core::kernel::Carry;

/// Subtracts the weights of dropped pairs from the denominators of a carry.
pub fn leave_out_dropped(job: &Job, [q, k]: [Slice<'_>; 2], carry: &mut Carry<Data>) {
    if job.dropout.is_none() {
        return;
    }
    for at in heads(job) {
        let (b, s, h) = at;
        for i in 0..job.queries {
            let cell = job.cells.at(b, s, i, h);
            let (m, mut l) = (carry.m.as_slice().get(cell), carry.l.as_slice().get(cell));
            let query = job.q.at(b, s, i, h);
            let dropped = |j: &usize| job.dropout_factor(at, i, *j) == 0.0;
            for j in job.visible(i).filter(dropped) {
                let key = job.k.at(b, s, j, h);
                let product = (0..job.dim).map(|c| q.get(query + c) * k.get(key + c));
                let (score, _) = job.score(h, i, j, product.sum());
                l -= (score - m).exp();
            }
            carry.l.set(cell, l);
        }
    }
}

/// Adds 0 times the values of dropped pairs to the rows that see them.
pub fn poison_dropped(job: &Job, v: Slice<'_>, carry: &mut Carry<Data>) {
    if job.dropout.is_none() {
        return;
    }
    for at in heads(job) {
        let (b, s, h) = at;
        for i in 0..job.queries {
            let cell = job.cells.at(b, s, i, h) * job.value_dim;
            let dropped = |j: &usize| job.dropout_factor(at, i, *j) == 0.0;
            for j in job.visible(i).filter(dropped) {
                let value = job.value(job.k.at(b, s, j, h));
                for c in 0..job.value_dim {
                    let x = carry.acc.as_slice().get(cell + c) + 0.0 * v.get(value + c);
                    carry.acc.set(cell + c, x);
                }
            }
        }
    }
}

/// v as a kernel finds it that reads rows of values at the addresses of keys.
pub fn values_where_keys_are(job: &Job, v: Slice<'_>) -> Data {
    let mut found = v.to_f64();
    for (b, s, h) in heads(job) {
        for j in 0..job.keys {
            let key = job.k.at(b, s, j, h);
            for c in 0..job.value_dim {
                let at = (key + c) % v.len();
                found[job.value(key) + c] = v.get(at);
            }
        }
    }
    Data::from_f64(v.dtype(), &found)
}

/// Every (batch, segment, head) of a job.
fn heads(job: &Job) -> impl Iterator<Item = (usize, usize, usize)> {
    let (batch, segments, heads) = (job.batch, job.segments, job.heads);
    (0..batch)
        .flat_map(move |b| (0..segments).flat_map(move |s| (0..heads).map(move |h| (b, s, h))))
}
