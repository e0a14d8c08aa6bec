"""A catalogue of faults to plant into a program or into a kernel while it plays, each named in plain English.

A program fault is a function from a program to a changed program, or to None where the program has no place for it. It
changes the program of one stage in one place, unless its name says otherwise. A kernel fault wraps the kernel of chosen
instructions. ``tests/exec_cpu/interpreter/test_planted_faults.py`` says which detector finds which fault where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from memo_exec.kernels import KERNELS, Call, Kernel
from memo_sim.program.ir.instruction import BufferClass, Instruction, Lane, Mode, Operand
from memo_sim.program.ir.kinds import FamilyKind, Phase, TemplateKind
from memo_sim.program.ir.program import Program
from memo_sim.program.ir.work import Collective, Exchange, PointToPoint

BACKWARDS = (TemplateKind.BACKWARD, TemplateKind.BACKWARD_RESIDENT)


@dataclass(frozen=True)
class Site:
    """An instruction of one instance: the number of the instance, and the position in its template."""

    instance: int
    position: int
    instruction: Instruction


Test = Callable[[Instruction], bool]


def sites(program: Program, test: Test, *kinds: TemplateKind) -> Iterator[Site]:
    """Yield the instructions of the first micro-batch for which ``test`` holds, in instances of ``kinds`` (or all)."""
    for number, instance in enumerate(program.instances):
        template = program.templates[instance.template]
        if instance.micro_batch > 0 or (kinds and template.kind not in kinds):
            continue
        for position, instruction in enumerate(template.instructions):
            if test(instruction):
                yield Site(number, position, instruction)


def middle(found: Iterator[Site]) -> Site | None:
    """Return the site in the middle, or None if there is none."""
    every = list(found)
    return every[len(every) // 2] if every else None


def edited(
    program: Program, number: int, change: Callable[[tuple[Instruction, ...]], tuple[Instruction, ...]]
) -> Program:
    """Return the program with other instructions in one instance, which gets a template of its own."""
    instance = program.instances[number]
    template = program.templates[instance.template]
    planted = replace(template, name=f"{template.name}.planted", instructions=change(template.instructions))
    return with_template(program, number, planted, instance.indices)


def with_template(program: Program, number: int, template: Any, indices: tuple[int, ...]) -> Program:
    """Return the program with one instance of another template."""
    instances = list(program.instances)
    instances[number] = msgspec.structs.replace(instances[number], template=len(program.templates), indices=indices)
    return replace(program, templates=(*program.templates, template), instances=tuple(instances))


def without(program: Program, site: Site | None) -> Program | None:
    """Leave out one instruction."""
    if site is None:
        return None
    at = site.position
    return edited(program, site.instance, lambda each: each[:at] + each[at + 1 :])


def instead(program: Program, site: Site, instruction: Instruction) -> Program:
    """Replace one instruction."""
    at = site.position
    return edited(program, site.instance, lambda each: (*each[:at], instruction, *each[at + 1 :]))


def has(role: str) -> Test:
    return lambda instruction: any(o.role == role for o in instruction.operands)


def operand(instruction: Instruction, role: str) -> Operand:
    return next(o for o in instruction.operands if o.role == role)


def with_operand(instruction: Instruction, role: str, **changes: Any) -> Instruction:
    """Return the instruction with one operand changed."""
    changed = tuple(msgspec.structs.replace(o, **changes) if o.role == role else o for o in instruction.operands)
    return msgspec.structs.replace(instruction, operands=changed)


def family_of(program: Program, site: Site, role: str) -> tuple[str, int]:
    """Return the family of an operand's buffer and its index there; the index is -1 for a template's own buffer."""
    instance = program.instances[site.instance]
    template = program.templates[instance.template]
    own = {f.name for f in template.own}
    indices = iter(instance.indices)
    bound = [-1 if slot in own else next(indices) for slot in template.slots]
    slot = operand(site.instruction, role).slot
    return template.slots[slot], bound[slot]


def redirected(program: Program, site: Site | None, role: str) -> Program | None:
    """Let one operand use the next buffer of its family, or the one before the last one."""
    if site is None:
        return None
    name, index = family_of(program, site, role)
    families = {f.name: f for f in program.families}
    if index < 0 or families[name].count == 1:
        return None
    # Of families with a buffer for each micro-batch and layer, the first micro-batch has the first buffers.
    count = families[name].count
    other = index + 1 if index + 1 < max(2, count // program.micro_batches) else index - 1
    instance = program.instances[site.instance]
    template = program.templates[instance.template]
    changed = with_operand(site.instruction, role, slot=len(template.slots))
    at = site.position
    instructions = (*template.instructions[:at], changed, *template.instructions[at + 1 :])
    planted = replace(
        template, name=f"{template.name}.planted", slots=(*template.slots, name), instructions=instructions
    )
    return with_template(program, site.instance, planted, (*instance.indices, other))


def fits_later(program: Program, site: Site, role: str) -> bool:
    """Return whether an operand still lies in its buffer when it begins one row later."""
    template = program.templates[program.instances[site.instance].template]
    families = {f.name: f for f in (*program.families, *template.own)}
    name, _ = family_of(program, site, role)
    each = operand(site.instruction, role)
    return each.first + each.tokens < families[name].tokens


def one_row_late(program: Program, found: Iterator[Site], role: str) -> Program | None:
    """Let one operand begin one row later, where the buffer has that row."""
    site = middle(s for s in found if has(role)(s.instruction) and fits_later(program, s, role))
    if site is None:
        return None
    first = operand(site.instruction, role).first
    return instead(program, site, with_operand(site.instruction, role, first=first + 1))


def of_phase(phase: Phase, *ops: str) -> Test:
    return lambda instruction: instruction.phase is phase and (not ops or instruction.op in ops)


def of_op(*ops: str) -> Test:
    return lambda instruction: instruction.op in ops


OFFLOAD, PREFETCH = of_phase(Phase.OFFLOAD), of_phase(Phase.PREFETCH)
ACTIVATION, ACTIVATION_BACKWARD = of_op("gelu", "swiglu"), of_op("gelu.bwd", "swiglu.bwd")
WGRAD = of_op("linear.wgrad")


def offload_left_out(program: Program) -> Program | None:
    return without(program, middle(sites(program, OFFLOAD)))


def prefetch_left_out(program: Program) -> Program | None:
    return without(program, middle(sites(program, PREFETCH)))


def offload_one_row_late(program: Program) -> Program | None:
    return one_row_late(program, sites(program, OFFLOAD), "source")


def prefetch_one_row_late(program: Program) -> Program | None:
    return one_row_late(program, sites(program, PREFETCH), "target")


def prefetch_of_another_tensor(program: Program) -> Program | None:
    """Two tensors of equal rows are exchanged: here one prefetch takes the other's host rows."""
    for site in sites(program, PREFETCH):
        template = program.templates[program.instances[site.instance].template]
        families = {f.name: f for f in program.families}
        for other in template.instructions:
            if other.phase is not Phase.PREFETCH or other is site.instruction:
                continue
            mine, theirs = operand(site.instruction, "source"), operand(other, "source")
            one, two = (families[template.slots[each.slot]] for each in (mine, theirs))
            if mine.tokens == theirs.tokens and one.row_bytes == two.row_bytes and one.name != two.name:
                changed = with_operand(site.instruction, "source", slot=theirs.slot, first=theirs.first)
                return instead(program, site, changed)
    return None


def prefetch_of_another_layer(program: Program) -> Program | None:
    return redirected(program, middle(sites(program, PREFETCH)), "source")


def offload_to_another_layer(program: Program) -> Program | None:
    return redirected(program, middle(sites(program, OFFLOAD)), "target")


def one_rounding_buffer_for_all(program: Program) -> Program | None:
    """Every layer uses the first rounding buffer, so each buffer is used again one layer early throughout."""
    rounding = {
        f.name
        for f in program.families
        if f.kind is FamilyKind.SKELETAL and f.space == "device" and f.count == 2 and f.lifetime == "step"
    }
    if not rounding:
        return None
    instances = []
    for instance in program.instances:
        template = program.templates[instance.template]
        own = {f.name for f in template.own}
        bound = [slot for slot in template.slots if slot not in own]
        indices = tuple(0 if s in rounding else i for s, i in zip(bound, instance.indices, strict=True))
        instances.append(msgspec.structs.replace(instance, indices=indices))
    return replace(program, instances=tuple(instances))


def backward_of_another_layers_input(program: Program) -> Program | None:
    """A product's weight gradient multiplies with the input that another layer kept."""
    found = (s for s in sites(program, WGRAD, *BACKWARDS) if family_of(program, s, "x")[1] >= 0)
    return redirected(program, middle(found), "x")


def log_sum_exp_of_another_layer(program: Program) -> Program | None:
    found = (s for s in sites(program, has("lse"), *BACKWARDS) if s.instruction.op == "attention.bwd")
    return redirected(program, middle(found), "lse")


def statistics_of_another_layer(program: Program) -> Program | None:
    norms = of_op("layer_norm.bwd", "rms_norm.bwd")
    found = (s for s in sites(program, norms, *BACKWARDS) if family_of(program, s, "stats")[1] >= 0)
    return redirected(program, middle(found), "stats")


def rebuilt_operator_left_out(program: Program) -> Program | None:
    return without(program, middle(sites(program, of_phase(Phase.RECOMPUTE))))


def rebuild_left_out(program: Program) -> Program | None:
    """Nothing of one layer is recomputed."""
    site = middle(sites(program, of_phase(Phase.RECOMPUTE)))
    if site is None:
        return None
    return edited(program, site.instance, lambda each: tuple(i for i in each if i.phase is not Phase.RECOMPUTE))


def wgrad_left_out(program: Program) -> Program | None:
    return without(program, middle(sites(program, WGRAD, *BACKWARDS)))


def wgrad_twice(program: Program) -> Program | None:
    site = middle(sites(program, WGRAD, *BACKWARDS))
    if site is None:
        return None
    again = msgspec.structs.replace(site.instruction, name=f"{site.instruction.name}.again")
    at = site.position
    return edited(program, site.instance, lambda each: (*each[: at + 1], again, *each[at + 1 :]))


def wgrad_to_another_layer(program: Program) -> Program | None:
    return redirected(program, middle(sites(program, WGRAD, *BACKWARDS)), "out")


def wgrad_of_another_layers_gradient(program: Program) -> Program | None:
    found = (s for s in sites(program, WGRAD, *BACKWARDS) if family_of(program, s, "grad")[0].startswith("grad.x"))
    return redirected(program, middle(found), "grad")


def residual_gradient_left_out(program: Program) -> Program | None:
    """A norm's backward does not add the gradient that goes round the norm."""
    site = middle(sites(program, has("residual_grad"), *BACKWARDS))
    if site is None:
        return None
    kept = tuple(o for o in site.instruction.operands if o.role != "residual_grad")
    return instead(program, site, msgspec.structs.replace(site.instruction, operands=kept))


def backward_operator_left_out(program: Program) -> Program | None:
    return without(program, middle(sites(program, ACTIVATION_BACKWARD, *BACKWARDS)))


def forward_operator_left_out(program: Program) -> Program | None:
    return without(program, middle(sites(program, ACTIVATION, TemplateKind.FORWARD)))


def weights_of_another_layer(program: Program) -> Program | None:
    return redirected(
        program, middle(sites(program, of_phase(Phase.FORWARD, "linear"), TemplateKind.FORWARD)), "weight"
    )


def gradients_not_zeroed(program: Program) -> Program | None:
    found = list(sites(program, of_op("zero"), TemplateKind.ZERO))
    return without(program, found[len(found) // 2]) if found else None


def prefetch_after_backward(program: Program) -> Program | None:
    """The prefetch of a layer's activations comes after the backward that needs them."""
    kinds = [program.templates[i.template].kind for i in program.instances]
    for number, instance in enumerate(program.instances):
        if kinds[number] is not TemplateKind.PREFETCH or instance.micro_batch:
            continue
        for later in range(number + 1, len(program.instances)):
            same = program.instances[later].layer == instance.layer
            if same and kinds[later] in (*BACKWARDS, TemplateKind.REBUILD):
                order = list(program.instances)
                order.insert(later, order.pop(number))
                return replace(program, instances=tuple(order))
    return None


def tokens_of_another_micro_batch(program: Program) -> Program | None:
    return redirected(program, middle(sites(program, of_op("embed"))), "ids")


def input_one_row_late(program: Program) -> Program | None:
    """A norm of the forward reads its rows one row late."""
    norms = of_phase(Phase.FORWARD, "layer_norm", "rms_norm")
    return one_row_late(program, sites(program, norms, TemplateKind.FORWARD), "x")


def output_one_row_late(program: Program) -> Program | None:
    """A product of the forward writes its rows one row late."""
    return one_row_late(program, sites(program, of_phase(Phase.FORWARD, "linear"), TemplateKind.FORWARD), "out")


def keys_of_another_layer(program: Program) -> Program | None:
    """Attention reads the keys and values that an earlier subsequence of another layer kept."""
    cached = {f.name for f in program.families if f.buffer_class is BufferClass.KV_CACHE}
    for site in sites(program, of_op("attention")):
        for each in site.instruction.operands:
            if each.mode is Mode.READ and family_of(program, site, each.role)[0] in cached:
                return redirected(program, site, each.role)
    return None


def gradient_of_earlier_keys_left_out(program: Program) -> Program | None:
    """The gradient that a later subsequence or chunk has for earlier keys and values is not added."""
    return without(program, middle(sites(program, of_op("grad.accumulate"))))


def message_left_out(program: Program) -> Program | None:
    """A collective, exchange, send or receive of a layer is left out, on every rank of its group."""

    def test(instruction: Instruction) -> bool:
        calls = isinstance(instruction.work, Collective | Exchange | PointToPoint)
        return calls and instruction.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.P2P, Phase.GATHER)

    return without(program, middle(sites(program, test)))


PROGRAM_FAULTS: dict[str, Callable[[Program], Program | None]] = {
    "an offload is left out": offload_left_out,
    "a prefetch is left out": prefetch_left_out,
    "an offload is one row late": offload_one_row_late,
    "a prefetch is one row late": prefetch_one_row_late,
    "a prefetch comes from another tensor's host rows": prefetch_of_another_tensor,
    "a prefetch comes from another layer's host rows": prefetch_of_another_layer,
    "an offload goes to another layer's host rows": offload_to_another_layer,
    "rounding buffers are reused one layer early throughout": one_rounding_buffer_for_all,
    "a prefetch comes after the backward": prefetch_after_backward,
    "a rebuilt operator is left out": rebuilt_operator_left_out,
    "the rebuild of a layer is left out": rebuild_left_out,
    "a weight gradient reads another layer's input": backward_of_another_layers_input,
    "a weight gradient reads another layer's gradient": wgrad_of_another_layers_gradient,
    "a weight gradient goes to another layer": wgrad_to_another_layer,
    "a weight gradient is left out": wgrad_left_out,
    "a weight gradient is added twice": wgrad_twice,
    "attention's backward reads another layer's log-sum-exp": log_sum_exp_of_another_layer,
    "a norm's backward reads another layer's statistics": statistics_of_another_layer,
    "a norm's backward leaves out the residual's gradient": residual_gradient_left_out,
    "an activation's backward is left out": backward_operator_left_out,
    "an activation of the forward is left out": forward_operator_left_out,
    "a product reads another layer's weights": weights_of_another_layer,
    "a block's gradients are not zeroed": gradients_not_zeroed,
    "the embedding reads another micro-batch's tokens": tokens_of_another_micro_batch,
    "a norm reads its input one row late": input_one_row_late,
    "a product writes its output one row late": output_one_row_late,
    "attention reads an earlier subsequence's keys of another layer": keys_of_another_layer,
    "the gradient of earlier keys and values is left out": gradient_of_earlier_keys_left_out,
    "a message between ranks is left out": message_left_out,
}


def nothing(call: Call) -> None:
    """A kernel that does nothing."""


def one_row_later(role: str) -> Callable[[Kernel], Kernel]:
    """Return a kernel that writes its rows one row late: the first one keeps what it held."""

    def wrap(kernel: Kernel) -> Kernel:
        def late(call: Call) -> None:
            out = call[role]
            held = out[:1].clone()
            kernel(call)
            out[1:] = out[:-1].clone()
            out[:1] = held

        return late

    return wrap


def spared(role: str) -> Callable[[Kernel], Kernel]:
    """Return a kernel that does not write one of its outputs."""

    def wrap(kernel: Kernel) -> Kernel:
        def sparing(call: Call) -> None:
            held = call[role].clone()
            kernel(call)
            call[role].copy_(held)

        return sparing

    return wrap


def wrong_log_sum_exp(kernel: Kernel) -> Kernel:
    """Return a kernel whose log-sum-exp is 0.1 too large."""

    def wrong(call: Call) -> None:
        kernel(call)
        call["lse"].add_(0.1)

    return wrong


def twice(kernel: Kernel) -> Kernel:
    """Return a kernel that does its work twice."""

    def again(call: Call) -> None:
        kernel(call)
        kernel(call)

    return again


@dataclass(frozen=True)
class KernelFault:
    """A fault of the kernel of every instruction for which ``test`` holds."""

    test: Test
    wrap: Callable[[Kernel], Kernel]

    def kernels(self) -> dict[str, Kernel]:
        """Return the kernels of every op, with the fault planted."""

        def planted(kernel: Kernel) -> Kernel:
            wrong = self.wrap(kernel)
            return lambda call: (wrong if self.test(call.instruction) else kernel)(call)

        return {op: planted(kernel) for op, kernel in KERNELS.items()}

    def applies(self, program: Program) -> bool:
        """Return whether the program has an instruction with the fault."""
        return any(self.test(i) for t in program.templates for i in t.instructions)


def does_nothing(kernel: Kernel) -> Kernel:
    """Return a kernel that does nothing."""
    del kernel
    return nothing


KERNEL_FAULTS = {
    "the kernels of rebuilt products do nothing": KernelFault(of_phase(Phase.RECOMPUTE, "linear"), does_nothing),
    "the kernels of the forward's activations do nothing": KernelFault(
        of_phase(Phase.FORWARD, "gelu", "swiglu"), does_nothing
    ),
    "the kernels of weight gradients do nothing": KernelFault(WGRAD, does_nothing),
    "the kernels of weight gradients add twice": KernelFault(of_phase(Phase.BACKWARD, "linear.wgrad"), twice),
    "offloads copy nothing": KernelFault(OFFLOAD, does_nothing),
    "prefetches copy nothing": KernelFault(PREFETCH, does_nothing),
    "prefetches copy their rows one row late": KernelFault(PREFETCH, one_row_later("target")),
    "norms write their rows one row late": KernelFault(
        of_phase(Phase.FORWARD, "layer_norm", "rms_norm"), one_row_later("out")
    ),
    "attention does not write its log-sum-exp": KernelFault(
        lambda i: i.op == "attention" and i.lane is Lane.COMPUTE, spared("lse")
    ),
    "attention writes a wrong log-sum-exp": KernelFault(
        lambda i: i.op == "attention" and i.lane is Lane.COMPUTE, wrong_log_sum_exp
    ),
}


ONE_PROCESS = ("keep", "full", "inputs", "tokenwise", "swap", "selective", "subseq", "chunked")
SEVERAL_RANKS = ("tp", "ulysses", "ring", "pp", "zero3", "metp")
"""The columns of the tables: the lowerings of ``test_planted_faults.py``."""

PROGRAM_TABLE = """
                                                                keep full inpu toke swap sele subs chun
an offload is left out                                          -    -    cdv  cdv  cdv  -    cdv  -
a prefetch is left out                                          -    -    cdv  cdv  cdv  -    cdv  -
an offload is one row late                                      -    -    -    cdv  -    -    cdv  -
a prefetch is one row late                                      -    -    -    cdv  -    -    cdv  -
a prefetch comes from another tensor's host rows                -    -    -    cdv  cdv  -    cdv  -
a prefetch comes from another layer's host rows                 -    -    cdv  cdv  cdv  -    cdv  -
an offload goes to another layer's host rows                    -    -    cd=  cdv  cdv  -    cdv  -
rounding buffers are reused one layer early throughout          -    -    cdv  cdv  cdv  -    cdv  -
a prefetch comes after the backward                             -    -    cdv  cdv  cdv  -    cdv  -
a rebuilt operator is left out                                  -    cdv  cdv  cdv  -    cdv  cdv  cdv
the rebuild of a layer is left out                              -    cdv  cdv  cdv  -    cdv  cdv  cdv
a weight gradient reads another layer's input                   cdv  -    -    cdv  cdv  cdv  cdv  -
a weight gradient reads another layer's gradient                cdv  cdv  cdv  cdv  cdv  cdv  cdv  cdv
a weight gradient goes to another layer                         cdv  cdv  cdv  cdv  cdv  cdv  cdv  cdv
a weight gradient is left out                                   cdv  cdv  cdv  cdv  cdv  cdv  cdv  cdv
a weight gradient is added twice                                cdv  cdv  cdv  cdv  cdv  cdv  cdv  cdv
attention's backward reads another layer's log-sum-exp          cdv  -    -    cdv  cdv  -    cdv  -
a norm's backward reads another layer's statistics              cdv  -    -    cdv  cdv  cdv  cdv  -
a norm's backward leaves out the residual's gradient            cdv  cdv  cdv  cdv  cdv  cdv  cdv  cdv
an activation's backward is left out                            cdv  cdv  cdv  cdv  cdv  cdv  cdv  cdv
an activation of the forward is left out                        cdv  cdv  cdv  cdv  cdv  cdv  cdv  cdv
a product reads another layer's weights                         cdv  cdv  cdv  cdv  cdv  cdv  cdv  cdv
a block's gradients are not zeroed                              cdv  cdv  cdv  cdv  cdv  cdv  cdv  cdv
the embedding reads another micro-batch's tokens                cdv  cdv  cdv  cdv  cdv  cdv  cdv  cdv
a norm reads its input one row late                             -    -    -    cdv  -    -    cdv  cdv
a product writes its output one row late                        -    -    -    cdv  -    -    cdv  cdv
attention reads an earlier subsequence's keys of another layer  -    -    -    -    -    -    cdv  -
the gradient of earlier keys and values is left out             -    -    -    -    -    -    cdv  cdv
a message between ranks is left out                             -    -    -    -    -    -    -    -
"""
"""Who has to find a program fault in which lowering: c the checkers of programs (``memo_sim/program/verify``), d
``--debug`` while the program plays, v the comparison of gradients with keeping everything.

"-": the lowering has no place for the fault. "=": the fault changes no gradient there. All cells were written before a
detector was run, and one was mended since: with whole layer inputs offloaded, the rows of the wrong layer and of the
right one have the same bytes of the host slab, one after the other, so the prefetch finds its rows by luck.
"""

RANKS_TABLE = """
                                                                tp   ulys ring pp   zero metp
an offload is left out                                          c    c    c    c    c    c
a prefetch is left out                                          c    c    c    c    c    c
an offload is one row late                                      c    c    c    c    c    c
a prefetch is one row late                                      c    c    c    c    c    c
a prefetch comes from another tensor's host rows                c    c    c    c    c    c
a prefetch comes from another layer's host rows                 c    c    c    c    c    c
an offload goes to another layer's host rows                    c    c    c    c    c    c
rounding buffers are reused one layer early throughout          c    c    c    c    c    c
a prefetch comes after the backward                             c    c    c    c    c    c
a rebuilt operator is left out                                  c    c    c    c    c    c
the rebuild of a layer is left out                              c    c    c    c    c    c
a weight gradient reads another layer's input                   c    c    c    c    c    c
a weight gradient reads another layer's gradient                -    c    c    c    c    c
a weight gradient goes to another layer                         c    c    c    c    c    c
a weight gradient is left out                                   c    c    c    c    c    c
a weight gradient is added twice                                c    c    c    c    c    c
attention's backward reads another layer's log-sum-exp          c    c    c    c    c    c
a norm's backward reads another layer's statistics              c    c    c    c    c    c
a norm's backward leaves out the residual's gradient            c    c    c    c    c    c
an activation's backward is left out                            c    c    c    c    c    c
an activation of the forward is left out                        c    c    c    c    c    c
a product reads another layer's weights                         c    c    c    c    c    -
a block's gradients are not zeroed                              c    c    c    c    c    c
the embedding reads another micro-batch's tokens                c    c    c    c    c    c
a norm reads its input one row late                             c    c    c    c    c    -
a product writes its output one row late                        c    c    c    c    c    c
attention reads an earlier subsequence's keys of another layer  -    -    -    -    -    -
the gradient of earlier keys and values is left out             -    -    c    -    c    c
a message between ranks is left out                             c    c    c    c    c    c
"""
"""The same for layouts of several ranks, which one process cannot play: checkers alone."""

KERNEL_TABLE = """
                                                                keep full inpu toke swap sele subs chun
the kernels of rebuilt products do nothing                      -    dv   dv   dv   -    -    dv   dv
the kernels of the forward's activations do nothing             dv   dv   dv   dv   dv   dv   dv   dv
the kernels of weight gradients do nothing                      dv   dv   dv   dv   dv   dv   dv   dv
the kernels of weight gradients add twice                       v    v    v    v    v    v    v    v
offloads copy nothing                                           -    -    dv   dv   dv   -    dv   -
prefetches copy nothing                                         -    -    dv   dv   dv   -    dv   -
prefetches copy their rows one row late                         -    -    dv   dv   dv   -    dv   -
norms write their rows one row late                             dv   dv   dv   dv   dv   dv   dv   dv
attention does not write its log-sum-exp                        dv   dv   dv   dv   dv   dv   dv   dv
attention writes a wrong log-sum-exp                            v    v    v    v    v    v    v    v
"""
"""The same for kernels. No checker of programs can see them, and wrong numbers are for the comparison to find."""
