# SPDX-License-Identifier: Apache-2.0
"""The optimizer: what happens in a step, and where its state lives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from dash_optim import adamw
from dash_optim.blocks import Geometry
from dash_optim.checks import (
    UNSUPPORTED,
    check_groups,
    check_parameter,
    check_state,
    check_wire,
    is_sharded,
    refuse_pieces,
    refuse_unsupported,
    route,
)
from dash_optim.diagnostics import Diagnostics, diagnose, summarise
from dash_optim.gradients import (
    Active,
    NonfiniteGradientError,
    describe_nonfinite,
    nonfinite,
    with_gradient,
)
from dash_optim.grafting import Grafting, Scalar
from dash_optim.names import parameter_name
from dash_optim.options import DEFAULTS, STRUCTURE, normalise, recipe_of
from dash_optim.refresh import due_blocks, over_budget
from dash_optim.stacks import Parameter, Stack, build_stacks, element_names
from dash_optim.step import Waiting, finish_layers, update_stack
from matroots._products import wide
from matroots.scaling import Scaling
from matroots.solvers import Solver

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dash_optim.distributed import Sharing


class PreconditionerError(RuntimeError):
    """A root has failed more often in a row than ``failure_budget`` allows; names parameter, block and status."""

    after_step = True


class PeerError(RuntimeError):
    """Another rank has failed, or can no longer be reached; the message names it and what it said."""


class DASH(Optimizer):
    """Shampoo on stacked blocks (Distributed Accelerated SHampoo, arXiv:2602.02016).

    Each parameter is seen as a matrix ``rows x cols`` and cut into blocks. For a block with gradient G::

        L <- b L + (1 - b) G G^T           R <- b R + (1 - b) G^T G          b = beta_factors
        N = beta3 M + (1 - beta3) G        U = (L + eps I)^{-1/p} N (R + eps I)^{-1/p}
        M <- beta1 M + (1 - beta1) G
        W <- W (1 - lr weight_decay) - lr U ||D|| / ||U||

    with averages divided by ``1 - b^t`` (``bias_correction``), ``eps = damping + rel_damping lambda_bound(L)`` and D the step of the grafted
    method. Blocks of one shape, over all layers of a device, are one 3-D tensor. All options can differ between groups, and
    all but those of the state's shape (`options.STRUCTURE`) may change during training.

    Args:
        params: as for every optimizer of ``torch.optim``: tensors, ``(name, tensor)`` pairs or groups.
        lr: learning rate, that of the grafted method (Adam's, unless ``grafting`` says otherwise); a number or a tensor of one element.
        betas: decay of the gradient average (0: no average is kept), and of the second moment of grafting and AdamW.
        beta3: decay of the gradient average in what is preconditioned, N: 0 to ``betas[0]``, which makes N = M. None: ``betas[0]^2``, Nesterov's step ahead, as in
            Dozat's NAdam and torch's Muon. The grafted method's length is not changed by it.
        block_size: largest side of a block; ``inf`` for one block a parameter.
        p: order of the root: 2, which trains best wherever it was measured (docs/studies). Any value that the method takes, also ``"8/3"``. None
            is 2k for a tensor with k factors: 4 for matrices, as in the paper.
        method: "auto" (`options.Recipe.solver_for`), or what ``matroots.inv_root`` takes: "evd", "cn", "ndb", "chebyshev", "minimax", "rational", or an
            instance such as ``NewtonDB(steps=10)``.
        scaling, matmul_dtype, tol, max_steps: as for ``matroots.inv_root``.
        damping, rel_damping: eps, in units of the (corrected) factor and of its :func:`matroots.lambda_bound`.
        beta_factors: decay of the factors; 1.0 sums them, as AdaGrad does.
        bias_correction: divide averages of gradients and factors by ``1 - decay^t``.
        update_freq: steps between refreshes of a root.
        refresh_young: refresh more often while the factors are averages of less than ``4 update_freq`` gradients, so that never more than about a third of
            them are younger than the root (`refresh.interval`).
        start_step: so many steps are the grafted method's own.
        refresh: "staggered", the roots of an ``update_freq``-th of the blocks each step; "interval", all of them every ``update_freq`` steps; "certified", a root
            whenever it is not proven to be within ``refresh_tol`` (needs p = a/b with even a; looks at the device each step).
        refresh_tol: relative error of a root in the 2-norm that "certified" tolerates.
        failure_budget: so many failures of a root in a row are borne with the last good one; one more raises `PreconditionerError`.
        grafting: "adam", "rmsprop", "adagrad", "sgd", an instance such as ``Adam(beta2=0.99)``, or None: U as it is.
        grafting_scope: norms of each "block" or of the whole "layer".
        momentum, nesterov: as in ``torch.optim.SGD``, on U.
        weight_decay: decoupled, ``W <- W (1 - lr weight_decay)``, of every parameter in the group, whatever its shape.
        maximize: climb instead.
        algorithm: "dash", or "adamw" for the whole group.
        one_d: vectors by "adamw", or by "dash" with one factor. Scalars are always AdamW's.
        nd: tensors of more than two dimensions as a "matrix" (first, all others), or as a "tensor" with a factor for each dimension.
        max_factor_dim: a dimension longer than this has no factor.
        eps: of AdamW.
        factor_dtype: of averages, factors and roots: ``torch.float32`` or ``float64``; None: float64 for float64 parameters, else float32.
        stacking: over the whole "device", each "layer", or "none": one block at a time.
        max_batch: blocks worked on at once, which bounds the workspace; None: what a cache holds.
        nonfinite: a step with a NaN or an infinity in any gradient, or in its squares, is left out ("skip"; accelerators decide without the host),
            or raises ("raise").
        process_group: ranks over which the work is shared, ``torch.distributed.group.WORLD`` for all; their gradients have to be averaged, as
            DistributedDataParallel does. None: every process computes everything, unless parameters are sharded (``fully_shard``): then their ranks share it.
        communication_dtype: in which steps travel between ranks; None: that of the parameter (bfloat16 for float16).
        foreach: accepted; blocks are always worked on in batches.
        fused, capturable, differentiable: refused when true.

    Raises:
        ValueError, TypeError: for options that are not possible, naming them.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = DEFAULTS["lr"],
        betas: tuple[float, float] = DEFAULTS["betas"],
        *,
        beta3: float | None = DEFAULTS["beta3"],
        block_size: float = DEFAULTS["block_size"],
        p: Any = DEFAULTS["p"],
        method: str | Solver | Mapping[str, Any] = DEFAULTS["method"],
        scaling: str | Scaling | Mapping[str, Any] | None = DEFAULTS["scaling"],
        matmul_dtype: torch.dtype | str | None = DEFAULTS["matmul_dtype"],
        tol: float | None = DEFAULTS["tol"],
        max_steps: int | None = DEFAULTS["max_steps"],
        damping: float = DEFAULTS["damping"],
        rel_damping: float = DEFAULTS["rel_damping"],
        beta_factors: float = DEFAULTS["beta_factors"],
        bias_correction: bool = DEFAULTS["bias_correction"],
        update_freq: int = DEFAULTS["update_freq"],
        refresh_young: bool = DEFAULTS["refresh_young"],
        start_step: int = DEFAULTS["start_step"],
        refresh: str = DEFAULTS["refresh"],
        refresh_tol: float = DEFAULTS["refresh_tol"],
        failure_budget: int = DEFAULTS["failure_budget"],
        grafting: str | Grafting | Mapping[str, Any] | None = DEFAULTS["grafting"],
        grafting_scope: str = DEFAULTS["grafting_scope"],
        momentum: float = DEFAULTS["momentum"],
        nesterov: bool = DEFAULTS["nesterov"],
        weight_decay: float = DEFAULTS["weight_decay"],
        maximize: bool = DEFAULTS["maximize"],
        algorithm: str = DEFAULTS["algorithm"],
        one_d: str = DEFAULTS["one_d"],
        nd: str = DEFAULTS["nd"],
        max_factor_dim: float = DEFAULTS["max_factor_dim"],
        eps: float = DEFAULTS["eps"],
        factor_dtype: torch.dtype | str | None = DEFAULTS["factor_dtype"],
        stacking: str = DEFAULTS["stacking"],
        max_batch: int | None = DEFAULTS["max_batch"],
        nonfinite: str = "skip",
        process_group: ProcessGroup | None = None,
        communication_dtype: torch.dtype | str | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        given = locals()
        refuse_unsupported(foreach=foreach, fused=fused, capturable=capturable, differentiable=differentiable)
        if nonfinite not in ("skip", "raise"):
            raise ValueError(f"nonfinite: expected 'skip' or 'raise', got {nonfinite!r}")
        defaults = {name: given[name] for name in DEFAULTS} | {"nonfinite": nonfinite}
        normalise(defaults)
        super().__init__(params, defaults)
        self._given, self._wire = process_group, check_wire(communication_dtype)
        self._find_group()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies of an optimizer that shares its work: they would speak to the other ranks at the same time."""
        if self._is_shared():
            raise TypeError(
                "copy, pickle: not possible while ranks share the work; make another optimizer and load the state_dict"
            )
        state: dict[str, Any] = super().__getstate__()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; the stacks are rebuilt from the state by the next step."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("beta3", group["betas"][0])  # from before there was one: it goes on as it was
        self._stacks = None

    _stacks: list[Stack] | None = None
    _snapshot: tuple[Any, ...] = ()
    _given: ProcessGroup | None = None
    _wire: torch.dtype | None = None
    _sharing: Sharing | None = None
    _shown: list[Stack] | None = None
    _whole: StateDict | None = None
    _skipped: Scalar = 0.0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; what it does not say is as it was said to the optimizer."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            refuse_unsupported(**{name: group.get(name) for name in ("foreach", *UNSUPPORTED)})
            normalise(group)
            if group["nonfinite"] != self.defaults["nonfinite"]:
                raise ValueError("nonfinite: is one for all groups; give it to DASH itself")
            for param in group["params"]:
                check_parameter(group, param)
            self._find_group()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._stacks = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step on the gradients as they are; parameters without one are left alone, and so is ``grad``.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            What the closure returned.

        Raises:
            NonfiniteGradientError: before anything changes, with ``nonfinite="raise"``.
            PreconditionerError: after the step, when roots keep failing.
            TypeError: for a sparse gradient, before anything changes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._whole = None
        if self._is_shared():
            self._skipped += not self._shared().step()
            self._follow_state()
            return loss
        active = [(group, with_gradient(group)) for group in self.param_groups]
        found = self._nonfinite(active)
        if found is True:
            self._skipped += 1
        elif any(params for _, params in active):
            self.update(active, found)
        return loss

    def _is_shared(self) -> bool:
        """Whether ranks share the work; looked at anew where parameters have been replaced: accelerate puts sharded ones there after the optimizer is made.

        Not a property: torch's compiler takes one of an optimizer for an object, which is never None.
        """
        known = self._sharing
        return (known is not None and _serves(known, self.param_groups)) or self._find_group() is not None

    def _find_group(self) -> ProcessGroup | None:
        """Return the ranks that share the work, None for a process on its own."""
        if self._given is None and not any(is_sharded(p) for g in self.param_groups for p in g["params"]):
            return None  # torch.distributed takes long to import
        from dash_optim.distributed import sharing_group

        return sharing_group(self.param_groups, self._given)

    def _shared(self) -> Sharing:
        """Return what shares the work; made anew, with the state that there is, when parameters have been added or replaced."""
        old = self._sharing
        if old is None or not _serves(old, self.param_groups):
            from dash_optim.distributed import Sharing

            group = self._find_group()
            assert group is not None
            made = Sharing(self, group, self._wire)
            if old is not None and any(old.steps):
                state = old.gathered_state(None)
                if len(made.owners) == len(old.owners):  # each has the place of another
                    pairs = zip(made.owners, old.owners, strict=True)
                    state = {new: state[was] for (_, new), (_, was) in pairs if was in state}
                made.adopt(made.taken_from(state))
            elif old is None and self.state:  # of steps before the first sharded parameter was added
                made.adopt(made.taken_from(self.state))
            self._sharing = made
        assert self._sharing is not None
        return self._sharing

    def _known(self) -> Sharing:
        """Return what shares the work, as it was in the last step: one rank alone may ask."""
        return self._sharing or self._shared()

    def _nonfinite(self, active: Active) -> Tensor | bool:
        """Return whether the step is to be left out: True or False where looking is free, else a tensor, 1.0 or 0.0."""
        found = nonfinite(active)
        if found is None:
            return False
        if self.defaults["nonfinite"] == "raise":
            if bool(found):
                gradients = ((group, param, param.grad) for group, params in active for param in params)
                raise NonfiniteGradientError(describe_nonfinite(gradients, self.state))
            return False
        return bool(found) if _looking_is_free(found) else found.float()

    def update(self, active: Active, found: Tensor | bool = False) -> None:
        """Update these parameters; ``found``, a tensor with one element, leaves the step out where it is 1."""
        self._ensure_state(active)
        stacks = self._current_stacks()
        skip = found if isinstance(found, Tensor) else None
        taken: Scalar = 1.0 if skip is None else 1.0 - skip.to(wide(skip.device))
        if skip is not None:
            self._skipped = self._skipped + skip
        preconditioned = set()
        for group, params in active:
            mine = [param for param in params if "calls" in self.state[param]]
            for param in mine:
                self.state[param]["calls"] += 1
            counted = [*mine, *(param for param in params if not param.numel())]
            for device in dict.fromkeys(param.device for param in counted):
                there = [self.state[param]["step"] for param in counted if param.device == device]
                if isinstance(
                    taken, Tensor
                ):  # without alpha torch takes a tensor for a number, and waits to read it
                    torch._foreach_add_(there, taken.to(device, torch.float32), alpha=1.0)
                else:
                    torch._foreach_add_(there, taken)
            others = [param for param in params if param.numel() and "calls" not in self.state[param]]
            if others:
                steps = [self.state[param]["step"] for param in others]
                adamw.update(others, self.state, group, steps, skip)
            preconditioned.update(mine)
        waiting: list[Waiting] = []
        for stack in stacks:
            waiting += self._step_stack(stack, preconditioned, _on(stack.device, taken))
        finish_layers(waiting, taken)
        self._check_budget(stacks)

    def _step_stack(self, stack: Stack, active: set[Tensor], taken: Scalar) -> list[Waiting]:
        """Update the blocks of those parameters of a stack that have a gradient."""
        calls = [int(self.state[member.param]["calls"]) for member in stack.members]
        start = stack.recipe.start_step
        phases = [
            (1 + (count > start)) if member.param in active else 0
            for member, count in zip(stack.members, calls, strict=True)
        ]
        if not any(phases):
            return []
        chunks = stack.chunks(phases)
        steps = torch.stack([self.state[member.param]["step"] for member in stack.members])
        t = steps.to(stack.sides[0].record.dtype)[stack.member_of]
        if isinstance(taken, Tensor):  # of a first step that is left out: a correction 1 - b^0 would be a 0/0
            t = t.clamp_min(1.0)
        return update_stack(stack, chunks, due_blocks(stack, chunks, calls), t, taken)

    def _ensure_state(self, active: Active) -> None:
        """Give a state to parameters that see their first gradient."""
        for group, params in active:
            for param in params:
                own = self.state[param]
                if "step" in own:
                    continue
                own["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
                if self.geometry_of(group, param).classes:
                    own["calls"] = 0
                else:
                    adamw.init_state(own, param)
                self._stacks = None

    def geometry_of(self, group: dict[str, Any], param: Tensor) -> Geometry:
        """Return how a parameter is cut into blocks; without any it is AdamW's."""
        return route(group, param)

    def phases(self) -> dict[Tensor, int]:
        """Return how many blocks the parameters before each one have: staggered refreshes go through all of them."""
        found: dict[Tensor, int] = {}
        blocks = 0
        for group in self.param_groups:
            for param in dict.fromkeys(group["params"]):
                found[param] = blocks
                blocks += self.geometry_of(group, param).blocks
        return found

    def layer_of(self, param: Tensor) -> object:
        """Return what is the same for all that is grafted together, if by layer: the parameter itself."""
        return param

    def build_state(self) -> list[Stack]:
        """Give every parameter its state now, not at its first gradient; return the stacks."""
        self._ensure_state([(group, list(dict.fromkeys(group["params"]))) for group in self.param_groups])
        return self._current_stacks()

    def _current_stacks(self) -> list[Stack]:
        """Return the stacks, rebuilt if parameters or options have changed so that they no longer fit."""
        snapshot = tuple(
            (recipe_of(group), *(str(group[name]) for name in STRUCTURE)) for group in self.param_groups
        )
        if self._stacks is not None and not self._in_place():
            self._stacks = None
        if self._stacks is not None and snapshot != self._snapshot and not self._adopt():
            self._stacks = None
        self._snapshot = snapshot
        if self._stacks is None:
            self._stacks = build_stacks(self._parameters(), self.state)
        return self._stacks

    def _in_place(self) -> bool:
        """Whether the stacks still are what the state shows, and their groups those of the optimizer: both can be replaced from outside."""
        assert self._stacks is not None
        groups = {id(group) for group in self.param_groups}
        return all(
            all(id(member.group) in groups for member in stack.members) and stack.is_shown(self.state)
            for stack in self._stacks
        )

    def _adopt(self) -> bool:
        """Give the stacks the recipes that their groups have now; False if those differ within a stack or want other state."""
        assert self._stacks is not None
        for stack in self._stacks:
            recipes = {recipe_of(member.group) for member in stack.members}
            recipe = recipes.pop()
            same = (
                not recipes
                and element_names(recipe) == list(stack.elements)
                and recipe.exponent(len(stack.factored)) == stack.p
                and recipe.stacking == stack.recipe.stacking
                and recipe.max_batch == stack.recipe.max_batch
            )
            if not same:
                return False
            stack.recipe = recipe
        return True

    def _parameters(self) -> list[Parameter]:
        """Return the parameters that have been preconditioned so far, in the order of the groups."""
        found, phases = [], self.phases()
        for group in self.param_groups:
            recipe = recipe_of(group)
            for param in dict.fromkeys(group["params"]):
                seen = self.geometry_of(group, param)
                own = self.state.get(param, {})
                if ("calls" in own) != bool(seen.classes) and "step" in own:
                    raise ValueError(
                        f"{parameter_name(group, param)}: its state is that of another path than the options of its group say"
                    )
                check_state(group, param, seen, own)
                if "calls" in own:
                    found.append(Parameter(param, group, recipe, seen, phases[param], self.layer_of(param)))
        return found

    def _check_budget(self, stacks: list[Stack]) -> None:
        """Raise if a root has failed too often."""
        for stack in stacks:
            message = over_budget(stack)
            if message is not None:
                raise PreconditionerError(message)

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a checkpoint; every tensor keeps its own dtype, on the device of its parameter.

        Raises:
            ValueError: for a checkpoint of other groups, or of options that its tensors do not fit, such as another ``block_size``; nothing is
                changed then.
        """
        loaded: list[StateDict] = []
        taken: list[Any] = []

        def check(optimizer: Optimizer, incoming: StateDict) -> None:
            check_groups(self.param_groups, incoming["param_groups"])
            if self._is_shared():
                taken.append(self._shared().taken_from(dict(self._by_parameter(incoming))))
            else:
                refuse_pieces(incoming["state"])
            loaded.append(incoming)

        # after the user's hooks that may rewrite the checkpoint, and before those that may rewrite the state
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(
            lambda optimizer: self._restore_dtypes(loaded[0]), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()
        if self._is_shared():
            self._shared().adopt(*taken)
            self._show_state()

    def _by_parameter(self, incoming: StateDict) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yield each parameter that a checkpoint has a state of, and that state."""
        ids = [i for group in incoming["param_groups"] for i in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for i, param in zip(ids, params, strict=True):
            if i in incoming["state"]:
                yield param, incoming["state"][i]

    def _restore_dtypes(self, incoming: StateDict) -> None:
        """Put tensors back that torch has cast to their parameter's dtype, which loses bits of float32 averages."""
        for param, own in self._by_parameter(incoming):
            for name, value in own.items():
                if isinstance(value, Tensor):
                    self.state[param][name] = value.detach().clone().to(param.device)
        self._stacks = None

    def state_dict(self) -> StateDict:
        """Return the state; where ranks share the work, that of the blocks which this rank owns, as pieces that ``torch.distributed.checkpoint`` puts together."""
        whole, self._whole = self._whole, None
        if whole is not None:
            return whole
        if self._is_shared():
            self._show_state()
        return super().state_dict()

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Make the next ``state_dict()`` that of all ranks, as torch's ZeroRedundancyOptimizer does, for code that asks one rank alone; every rank has to call this.

        Args:
            to: the only rank of the group that is to have it; None: all have it. A step before it is asked for makes it void.
        """
        self._whole = self.full_state_dict(to)

    def full_state_dict(self, to: int | None = None) -> StateDict | None:
        """Return the state of all ranks as one process would have it, for ``torch.save``; every rank has to call this.

        Args:
            to: the only rank of the group that is to have it, the others get None; None: all have it.

        Raises:
            ValueError: for a rank that the group does not have.
        """
        ranks = self._shared().ranks if self._is_shared() else 1
        if to is not None and to not in range(ranks):
            raise ValueError(f"to: expected None or a rank of 0 to {ranks - 1}, got {to!r}")
        if not self._is_shared():
            return super().state_dict()
        shown, whole = self.state, self._shared().gathered_state(to)
        if to is not None and to != self._shared().rank:
            return None
        self.state = defaultdict(dict, whole)
        try:
            return super().state_dict()
        finally:
            self.state = shown

    def _follow_state(self) -> None:
        """Keep ``state`` true after a step: what it shows is memory of the inner optimizer, until that makes its stacks anew."""
        shared = self._known()
        started = [
            (count, param) for count, (_, param) in zip(shared.steps, shared.owners, strict=True) if count
        ]
        # a rank has no memory of the inner optimizer for what others own; and to look at state[param] makes an entry
        known = all("step" in self.state.get(param, ()) for _, param in started)
        if shared.inner._stacks is not self._shown or not known:
            self._show_state()
            self._shown = shared.inner._stacks
        for count, param in started:
            self.state[param]["step"].fill_(count)

    def _show_state(self) -> None:
        """Put what this rank owns into ``state``, as views."""
        self.state.clear()
        self.state.update(self._known().shown_state())

    def diagnostics(self, *, certify: bool = False) -> Diagnostics:
        """Return what is known of each preconditioned block; see :class:`Diagnostics`. Looks at the device.

        Args:
            certify: compute a certified error of each current root against the current factor (``matroots.certify``), which takes several
                products in float64; without it there is one only with ``refresh="certified"``.
        """
        if self._is_shared():
            inner = self._known().inner
            return diagnose(inner.built(), inner.state, float(self._skipped), certify=certify)
        return diagnose(self.built(), self.state, float(self._skipped), certify=certify)

    def summary(self) -> str:
        """Return a table: for each parameter its path, view and blocks, then the stacks and the memory of the state."""
        if not self._is_shared():
            return summarise(self.param_groups, self.built(), self.state, self.geometry_of)
        shared = self._known()
        lines = summarise(self.param_groups, shared.inner.built(), shared.inner.state, self.geometry_of)
        return f"{lines}\n{shared.summary()}"

    def built(self) -> list[Stack]:
        """Return the stacks that there are; none before the first step."""
        return self._current_stacks() if self._parameters() else []


def _serves(sharing: Sharing, groups: list[dict[str, Any]]) -> bool:
    """Whether what shares the work was made for these parameters, where they are now."""
    params = [param for group in groups for param in dict.fromkeys(group["params"])]
    return len(params) == len(sharing.owners) and all(
        param is known and param.device == sharing.device
        for param, (_, known) in zip(params, sharing.owners, strict=True)
    )


def _on(device: torch.device, taken: Scalar) -> Scalar:
    """Return the mask where it is needed: the parameters of a model may be on several devices."""
    return taken.to(device) if isinstance(taken, Tensor) else taken


def _looking_is_free(found: Tensor) -> bool:
    """Return whether the host can read a tensor without waiting for a device."""
    return found.is_cpu
