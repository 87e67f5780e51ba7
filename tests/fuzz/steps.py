"""The steps random programs are made of: source templates, whose fields are filled with variables that fit.

| field | what is drawn for it |
|---|---|
| `x` | any tensor |
| `f`, `i`, `b`, `n` | a tensor that is floating point, integer, bool, anything but bool |
| `m` | a floating-point tensor of two dimensions or more |
| `y`, `g` | a tensor that broadcasts with the first one drawn, of any dtype; a floating-point one |
| `w` | a tensor of the first one's shape and dtype |
| `dim` | a dimension of the first one |
| `k`, `p`, `c` | an integer from -3 to 3, one from 1 to 3, a float |
| `dtype` | a dtype |
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
DTYPE_WEIGHTS = (8, 2, 1, 1, 3, 2, 1, 1, 1, 2)

FUNCTIONS = """
torch.sin({f}) torch.cos({f}) torch.tanh({f}) torch.exp({f}) torch.log({f}) torch.sqrt({f}) torch.erf({f})
torch.sigmoid({f}) torch.expm1({f}) torch.log1p({f}) torch.rsqrt({f}) torch.reciprocal({f}) torch.atan({f})
torch.exp2({f}) torch.log2({f}) torch.asinh({f}) torch.frac({f}) torch.logit({f},eps=0.1) torch.sinc({f}) F.relu({n})
F.gelu({f}) F.gelu({f},approximate="tanh") F.silu({f}) F.softplus({f}) F.hardswish({f}) F.hardsigmoid({f}) F.elu({f})
F.leaky_relu({f},0.1) F.mish({f}) F.logsigmoid({f}) F.softsign({f}) F.hardtanh({f}) F.relu6({f}) F.selu({f})
torch.abs({n}) torch.neg({n}) torch.sign({x}) torch.square({x}) torch.floor({n}) torch.ceil({n}) torch.round({n})
torch.trunc({n}) torch.positive({n}) torch.signbit(torch.nan_to_num({x})) torch.isnan({x}) torch.isfinite({x})
torch.isinf({x}) torch.nan_to_num({x}) torch.nan_to_num({f},nan={c},posinf=9.0,neginf=-9.0) torch.logical_not({x})
torch.bitwise_not({i}) torch.deg2rad({f}) torch.clamp({n},{k}) torch.clamp({f},min=-1.5,max={c})
torch.clamp({n},max={k}) torch.threshold({f},0.1,2.0) torch.where({b},{y},{k}) torch.where({x}>0,{x},{y})
torch.masked_fill({x},{x}>{k},1) torch.lerp({f},{w},0.3) {x}+{y} {n}-{y} {x}*{y} {x}/{y} {x}//{y}
torch.remainder({n},{y}) torch.fmod({n},{y}) torch.pow({f},{y}) {n}%{p} torch.maximum({x},{y}) torch.minimum({x},{y})
torch.fmax({x},{y}) torch.fmin({x},{y}) torch.atan2({f},{g}) torch.copysign({f},torch.nan_to_num({g}))
torch.hypot({f},{w}) torch.heaviside({x},{w}) torch.xlogy({f},{g}) torch.nextafter({f},{w})
torch.div({n},{y},rounding_mode="trunc")
torch.div({n},{y},rounding_mode="floor") torch.logaddexp({f},{w}) {x}+{k} {x}*{c} {x}*{k} 1-{n} {n}-{c} 2/{x} {x}/{p}
{n}//{p} {n}//-2 {n}**2 {f}**{k} {i}**{p} {f}**0.5 {c}**{f} -{n} {f}//{c} torch.add({x},{y},alpha={p})
torch.sub({n},{w},alpha=2) torch.addcmul({f},{w},{w}) torch.rsub({n},{y}) {x}=={y} {x}!={y} {x}<{y} {x}>={y} {x}>{k}
{x}<={c} {x}!={x} torch.isclose({f},{w}) torch.logical_and({x},{y}) torch.logical_xor({x},{y}) {i}&{p} {i}|{w} {i}^{w}
{b}&{b} {b}|{y} {i}<<{p} {i}>>{p} ~{b}
"""

REDUCTIONS = """
torch.sum({x}) torch.sum({x},{dim}) torch.sum({x},{dim},keepdim=True) torch.mean({f}) torch.mean({f},{dim})
torch.prod({x}) torch.prod({x},{dim}) torch.amax({x},{dim}) torch.amin({x},{dim},keepdim=True) torch.amax({x})
torch.max({x}) torch.min({x},{dim}).values torch.any({x}) torch.any({x},{dim}) torch.all({x},{dim}) torch.all({x})
torch.argmax({n},{dim}) torch.argmin({n}) torch.var({f},{dim}) torch.std({f},{dim},correction=0) torch.var({f})
torch.logsumexp({f},{dim}) torch.norm({f}) torch.linalg.vector_norm({f},1,{dim}) torch.count_nonzero({x})
torch.count_nonzero({x},{dim}) torch.nansum({f},{dim}) torch.nanmean({f},{dim}) torch.aminmax({x}).max
torch.cumsum({x},{dim}) torch.cumprod({x},{dim}) torch.cummax({x},{dim}).values torch.cummin({x},{dim}).values
torch.logcumsumexp({f},{dim}) torch.diff({n},dim={dim}) torch.softmax({f},{dim}) torch.log_softmax({f},{dim})
torch.sort({x},{dim}).values torch.sort({x},{dim},descending=True,stable=True).values
torch.argsort({x},{dim},stable=True) torch.topk({n},1,{dim}).values torch.median({n}.contiguous(),{dim}).values
torch.kthvalue({n},1,{dim}).values torch.msort({n}) torch.searchsorted(torch.sort({n}.flatten()).values,{w})
torch.bucketize({n},torch.tensor([-1,0,2])) torch.isin({n},torch.tensor([0,1,2]))
torch.histc({f}.nan_to_num().clamp(-9,9),4,-2,2) torch.trace({m}) torch.quantile({f}.nan_to_num(),0.5)
"""

PRODUCTS = """
{m}@{m}.mT {m}.mT@{m} torch.matmul({m},{m}) {f}.reshape(-1)@{f}.reshape(-1) torch.outer({n}.flatten(),{n}.flatten())
torch.einsum("...ij,...kj->...ik",{m},{m}) torch.einsum("...i->...",{f})
F.linear({f},torch.linspace(-1,1,3*{f}.shape[-1],dtype={f}.dtype).reshape(3,-1))
torch.bmm({m}.reshape(-1,*{m}.shape[-2:]),{m}.reshape(-1,*{m}.shape[-2:]).mT)
torch.addmm(torch.ones(1,dtype={m}.dtype),{m},{m}.mT,beta=0.5) torch.kron({m},torch.eye(2,dtype={m}.dtype))
torch.cdist({m},{m}) {i}.flatten()@{i}.flatten() torch.baddbmm({m},{m},{m}.mT) F.layer_norm({f},{f}.shape[-1:])
F.rms_norm({f},{f}.shape[-1:]) F.normalize({f},dim={dim}) F.cosine_similarity({f},{w},dim={dim})
F.group_norm({m}.reshape({m}.shape[0],2,-1),2) F.mse_loss({f},{w})
F.scaled_dot_product_attention(*[{m}.nan_to_num(0,9,-9).clamp(-9,9)]*3)
F.l1_loss({f},{w}) F.smooth_l1_loss({f},{w}) F.binary_cross_entropy_with_logits({f},torch.sigmoid({w}))
F.kl_div({f},torch.sigmoid({w}),reduction="sum") F.cross_entropy({m},torch.softmax({m},1))
F.glu(torch.cat([{f},{f}],{dim}),{dim})
F.conv1d({m}.nan_to_num(0,9,-9).reshape(-1,1,{m}.shape[-1]),torch.ones(2,1,2,dtype={m}.dtype),padding=1)
F.avg_pool1d({m}.reshape(1,-1,{m}.shape[-1]),2,padding=1) F.max_pool1d({m}.reshape(1,-1,{m}.shape[-1]),2,padding=1)
F.adaptive_avg_pool1d({m}.reshape(1,-1,{m}.shape[-1]),2)
F.interpolate({m}.reshape(1,1,*{m}.shape[-2:]),scale_factor=2)
F.interpolate({m}.reshape(1,1,*{m}.shape[-2:]),scale_factor=2,mode="bilinear")
F.conv2d({m}.nan_to_num(0,9,-9).reshape(1,1,*{m}.shape[-2:]),torch.ones(2,1,2,2,dtype={m}.dtype),padding=1)
"""

INDEXING = """
torch.gather({x},{dim},torch.zeros_like({x},dtype=torch.int64)) torch.index_select({x},{dim},torch.tensor([0,0]))
{x}[torch.tensor([0])] {x}[...,torch.tensor([-1,0])] {x}[{x}.shape[0]-1]
torch.take_along_dim({x},torch.argsort({x},{dim},stable=True),{dim}) torch.take({x},torch.tensor([0,-1]))
F.embedding({i}.remainder(4),torch.linspace(-1,1,12).reshape(4,3)) F.one_hot({i}.remainder(3).long(),3)
torch.scatter({x},{dim},torch.zeros_like({x},dtype=torch.int64),1)
torch.scatter_add({n},{dim},torch.zeros_like({n},dtype=torch.int64),{n})
torch.index_add({n},{dim},torch.zeros({n}.shape[{dim}],dtype=torch.int64),{n})
torch.index_fill({x},{dim},torch.tensor([0]),1)
torch.scatter_reduce({f},{dim},torch.zeros_like({f},dtype=torch.int64),{f},"amax") torch.masked_scatter({x},{x}>0,{w})
torch.tril({m}) torch.triu({m},{k}) torch.diag_embed({n}) torch.cat([{x},{w}],{dim}) torch.cat([{x},{x},{x}],{dim})
torch.stack([{x},{w}],{dim}) torch.cat([{x}.flatten(),{n}.flatten()]) torch.flip({x},({dim},))
torch.roll({x},{k},{dim}) torch.roll({x},{k}) {x}.repeat(2,*[1]*{x}.dim()) torch.tile({x},(2,)) F.pad({x},(1,{p}))
F.pad({x},(-1,1)) F.pad({f},(0,2),value={c}) torch.repeat_interleave({x},2,{dim}) torch.rot90({m})
torch.broadcast_to({x},(2,*{x}.shape)) torch.zeros_like({x}) torch.ones_like({x}) torch.full_like({n},{k})
torch.arange({x}.shape[{dim}]) torch.arange({x}.shape[{dim}],dtype={f}.dtype) torch.eye({x}.shape[{dim}])
torch.full(({x}.shape[{dim}],),{c}) torch.linspace(-1,1,{p}) {x}.new_zeros({x}.shape)
torch.meshgrid({x}.flatten(),{w}.flatten(),indexing="ij")[0] torch.tensor({x}.shape[{dim}])
"""

VIEWS = """
{x}.transpose(0,{dim}) {x}.mT {x}.t() {x}.permute(*reversed(range({x}.dim()))) {x}.movedim(0,{dim}) {x}[...] {x}[1:]
{x}[:,1:] {x}[::2] {x}[...,:-1] {x}[:2] {x}[{k}] {x}.select({dim},0) {x}.narrow({dim},0,1) {x}.unsqueeze({dim})
{x}.unsqueeze(-1) {x}.squeeze() {x}.squeeze({dim}) {x}[None] {x}[...,None,:] {x}.expand(2,*{x}.shape) {x}.view(-1)
{x}.reshape(-1) {x}.flatten(-2) {x}.reshape({x}.shape[0],-1) {x}.reshape(*reversed({x}.shape)) {x}.unflatten(0,(1,-1))
{x}.chunk(2,{dim})[0] {x}.split(1,{dim})[-1] {x}.unbind({dim})[0] {x}.diagonal() {x}.diagonal(1,0,-1)
{x}.unfold({dim},1,1) {x}.unfold({dim},2,1) {x}.detach() {x}.swapaxes(0,-1) {x}.contiguous() {x}.clone()
{x}.view_as({w}) {x}.expand_as({x}) {x}.as_strided((min(2,{x}.numel()),),(1,)) {x}.tensor_split(2,{dim})[1]
{x}.view(*{x}.shape,1) {x}.ravel() {x}.real torch.atleast_2d({x}) {x}.view({x}.dtype)
"""

CASTS = """
{x}.to({f}.dtype) {n}.float() {x}.double() {x}.bool() {i}.long() {i}.to(torch.int32) {b}.to(torch.int8) {b}.float()
{i}.half() {f}.bfloat16() {f}.nan_to_num(0,9,-9).clamp(-99,99).to(torch.int32)
{f}.nan_to_num(0,9,-9).clamp(-99,99).long() {f}.nan_to_num(0,9,-9).clamp(0,99).to(torch.uint8) {i}.to(torch.uint8)
{i}.to(torch.int16) {f}.nan_to_num(0,9,-9).clamp(-99,99).to(torch.int8)
"""

WRITES = """
{x}.add_({y}) {n}.sub_(1) {x}.mul_({y}) {f}.div_({g}) {x}.copy_({y}) {x}.fill_(1) {x}.zero_() {n}.neg_() {f}.relu_()
{n}.clamp_({k},3) {f}.sigmoid_() {n}.abs_() {f}.sin_() {n}.remainder_({p}) {x}.masked_fill_({x}>0,1)
{x}.index_fill_({dim},torch.tensor([0]),0) {x}.scatter_({dim},torch.zeros_like({x},dtype=torch.int64),1) {x}[0]=1
{x}[1:]=0 {x}[...,0]={k} {x}[{x}>0]=0 {x}[...]={y} {x}[0]+=1 {x}[...,-1]*=2 {x}.T.add_(1) {n}.t().mul_(2)
{x}.view(-1)[0]=1 {n}.index_add_({dim},torch.zeros({n}.shape[{dim}],dtype=torch.int64),{n}.clone())
{x}.diagonal().zero_() {x}[::2].add_(1) {x}.transpose(0,{dim}).mul_(2) {x}.select({dim},0).fill_(0) {x}+=1 {n}*={y}
{n}-={y} {x}.index_copy_({dim},torch.tensor([0]),{x}.narrow({dim},0,1).clone())
{x}.index_put_((torch.tensor([0]),),{x}[:1].clone(),accumulate=True) {x}.t_() {x}.unsqueeze_(0) {x}.squeeze_()
{f}.nan_to_num_() {x}.tril_() {i}.floor_divide_({p}) {x}.logical_not_() {n}.pow_(2)
"""

FAMILIES: dict[str, tuple[str, ...]] = {
    "function": tuple(FUNCTIONS.split()),
    "reduction": tuple(REDUCTIONS.split()),
    "product": tuple(PRODUCTS.split()),
    "indexing": tuple(INDEXING.split()),
    "view": tuple(VIEWS.split()),
    "cast": tuple(CASTS.split()),
    "write": tuple(WRITES.split()),
}
FAMILY_WEIGHTS = (30, 14, 8, 12, 18, 6, 12)

_FIELD = re.compile(r"\{(\w+)\}")


class NoOperand(Exception):
    """No variable of the program fits a field."""


def draw_template(rng: random.Random) -> tuple[str, str]:
    """A family and one of its templates."""
    (family,) = rng.choices(list(FAMILIES), FAMILY_WEIGHTS)
    return family, rng.choice(FAMILIES[family])


def fill(template: str, variables: Mapping[str, Tensor], rng: random.Random) -> str:
    """The template with its fields drawn; a field that stands twice is one variable. Raises `NoOperand`."""
    drawn: dict[str, str] = {}
    for name in dict.fromkeys(_FIELD.findall(template)):
        first = next((variables[value] for value in drawn.values() if value in variables), None)
        drawn[name] = _draw(name, variables, first, rng)
    return _FIELD.sub(lambda match: drawn[match[1]], template)


def _draw(name: str, variables: Mapping[str, Tensor], first: Tensor | None, rng: random.Random) -> str:
    if name in _NUMBERS:
        return repr(rng.choice(_NUMBERS[name]))
    if name == "dim":
        if first is None or not first.dim():
            raise NoOperand(name)
        return str(rng.randrange(-first.dim(), first.dim()))
    fits = [key for key, value in variables.items() if _FITS[name](value, first)]
    if not fits:
        raise NoOperand(name)
    return rng.choice(fits[-4:] if rng.random() < 0.6 else fits)


_NUMBERS = {"k": (0, 1, 2, 3, -1, -2, -3), "p": (1, 2, 3), "c": (0.5, 2.0, -1.5, 0.0, 3.25)}


def _broadcasts(x: Tensor, first: Tensor | None) -> bool:
    if first is None:
        return True
    return all(a == b or a == 1 or b == 1 for a, b in zip(reversed(x.shape), reversed(first.shape), strict=False))


def _same(x: Tensor, first: Tensor | None) -> bool:
    return first is None or (x.shape == first.shape and x.dtype == first.dtype)


_FITS: dict[str, Callable[[Tensor, Tensor | None], bool]] = {
    "x": lambda x, first: True,
    "f": lambda x, first: x.is_floating_point(),
    "i": lambda x, first: x.dtype in INTEGERS,
    "b": lambda x, first: x.dtype == torch.bool,
    "n": lambda x, first: x.dtype != torch.bool,
    "m": lambda x, first: x.is_floating_point() and x.dim() > 1,
    "y": _broadcasts,
    "g": lambda x, first: x.is_floating_point() and _broadcasts(x, first),
    "w": _same,
}
