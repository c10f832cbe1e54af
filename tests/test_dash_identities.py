# SPDX-License-Identifier: Apache-2.0
"""Steps that can be worked out on paper, and symmetries: for the NumPy reference and for the optimizer alike."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from dash_cases import ALL_SHAPES, STACKINGS, both, problem, trajectory, updates
from dash_reference import Graft
from matrices import orthogonal
from scipy.linalg import fractional_matrix_power

NEVER = 10**6  # a start_step that no test reaches
OLD = {"refresh_young": False, "refresh": "interval"}
# U = L^{-1/2k} G R^{-1/2k} with the plain sums L of G G^T and R of G^T G
PLAIN = {
    "p": None,
    "grafting": None,
    "betas": (0.0, 0.95),
    "beta_factors": 1.0,
    "rel_damping": 0.0,
    "update_freq": 1,
}
BY_HAND = np.array([[3.0, 1.0], [0.0, 2.0]])


def svd(n: int = 6, m: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The parts of an n x m matrix with singular values from 1 to 3."""
    U, s, Vt = np.linalg.svd(np.random.default_rng(n).standard_normal((n, m or n)), full_matrices=False)
    return U, np.linspace(3.0, 1.0, len(s)), Vt


def same(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-12) -> None:
    """Equal to a tolerance relative to the largest entry."""
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


@both
def test_first_step_is_the_polar_factor(run):
    """Of a 2 x 2 matrix with positive determinant: ``(G + cofactors) / sqrt(||G||_F^2 + 2 det G)``, 14 + 2 * 6 = 26."""
    same(updates(run, [BY_HAND], **PLAIN)[0], np.array([[5.0, 1.0], [-1.0, 5.0]]) / np.sqrt(26.0))


@both
def test_first_step_for_p_2_is_the_transposed_inverse(run):
    same(updates(run, [BY_HAND], **{**PLAIN, "p": 2})[0], np.array([[2.0, 0.0], [-1.0, 3.0]]) / 6.0)


@both
@pytest.mark.parametrize(
    ("p", "exponent"), [(None, 0.0), (2, -1.0), (3, -1 / 3), (4.0, 0.0), ("8/3", -0.5), (8, 0.5)]
)
def test_first_step_for_any_p(p, exponent, run):
    """``L^{-1/p} U S V^T R^{-1/p} = U S^{1 - 4/p} V^T``."""
    U, s, Vt = svd()
    same(updates(run, [(U * s) @ Vt], **{**PLAIN, "p": p})[0], (U * s**exponent) @ Vt)


@both
def test_one_factor_is_half_as_far_from_the_root(run):
    """A side that is too long has no factor, and p = 2k = 2 for the other: ``(G G^T)^{-1/2} G`` is again the polar factor."""
    U, s, Vt = svd(3, 6)
    same(updates(run, [(U * s) @ Vt], max_factor_dim=5, **PLAIN)[0], U @ Vt)
    same(updates(run, [((U * s) @ Vt).T], max_factor_dim=5, **{**PLAIN, "p": 4})[0], ((U * s**0.5) @ Vt).T)


@both
@pytest.mark.parametrize("shape", [(5,), (5, 1), (1, 1, 5), (4, 3), (4, 2, 3), (3, 2, 1, 2, 2)])
@pytest.mark.parametrize("p", [None, 3])
def test_rank_one_gradient(p, shape, run):
    """Each of the k factors has one eigenvalue ``||G||^2``: ``U = G (||G||^2 + eps)^{-k/p}``, and None is p = 2k."""
    draw = np.random.default_rng(0)
    G = reduce(np.multiply.outer, [draw.standard_normal(n) for n in shape])
    k = sum(n > 1 for n in shape)
    options = {**PLAIN, "damping": 0.3, "nd": "tensor", "one_d": "dash", "p": p}
    same(updates(run, [G], **options)[0], G * (np.sum(G**2) + 0.3) ** (-0.5 if p is None else -k / p))


@both
@pytest.mark.parametrize(("nd", "view"), [("tensor", (4, 2, 3)), ("matrix", (4, 6))])
def test_step_is_a_kronecker_product_of_roots(nd, view, run):
    """``vec U = (L_1 + eps I)^{-1/2k} x ... x (L_k + eps I)^{-1/2k} vec G`` with factors summed over three steps."""
    gradients = [np.random.default_rng(t).standard_normal((4, 1, 2, 3)) for t in range(3)]
    k, roots = len(view), []
    for i, n in enumerate(view):
        rows = [np.moveaxis(G.reshape(view), i, 0).reshape(n, -1) for G in gradients]
        roots.append(fractional_matrix_power(sum(A @ A.T for A in rows) + 0.1 * np.eye(n), -1 / (2 * k)))
    expected = reduce(np.kron, roots) @ gradients[-1].ravel()
    same(updates(run, gradients, **{**PLAIN, "damping": 0.1, "nd": nd})[-1].ravel(), expected)


@both
def test_relative_damping_is_of_the_smaller_of_two_norms(run):
    """Of ``[[10, 2], [2, 4]]`` and ``[[9, 3], [3, 5]]`` the Frobenius norm, sqrt(124); of 5 I the row sum, 5."""
    U, s, Vt = np.linalg.svd(BY_HAND)
    options = {**PLAIN, "rel_damping": 0.1}
    same(updates(run, [BY_HAND], **options)[0], (U * (s / np.sqrt(s**2 + 0.1 * np.sqrt(124.0)))) @ Vt)
    G = np.array([[2.0, 1.0], [-1.0, 2.0]])
    same(updates(run, [G], **options)[0], G / np.sqrt(5.5))
    same(updates(run, [G], **options, damping=0.5)[0], G / np.sqrt(6.0))


@both
def test_repeated_gradient(run):
    """Sums of t equal terms give ``t^{-1/2}`` of the polar factor; averages give it back, if their bias is corrected."""
    U, s, Vt = svd()
    t = np.arange(1.0, 8.0)
    for options, size in (
        ({"beta_factors": 1.0}, t**-0.5),
        ({"beta_factors": 0.6}, t**0),
        ({"beta_factors": 0.6, "betas": (0.9, 0.95)}, t**0),
        (
            {"beta_factors": 0.6, "betas": (0.9, 0.95), "bias_correction": False},
            (1 - 0.9 ** (t + 1))
            * (1 - 0.6**t) ** -0.5,  # Nesterov's step is that of an average one gradient older
        ),
        (
            {"beta_factors": 1.0, "betas": (0.9, 0.95), "bias_correction": False},
            (1 - 0.9 ** (t + 1)) * t**-0.5,
        ),
        (
            {"beta_factors": 1.0, "betas": (0.9, 0.95), "beta3": 0.9, "bias_correction": False},
            (1 - 0.9**t) * t**-0.5,
        ),
        ({"beta_factors": 1.0, "betas": (0.9, 0.95), "beta3": 0.0, "bias_correction": False}, t**-0.5),
        ({"beta_factors": 1.0, "betas": (0.9, 0.95), "beta3": 0.5}, t**-0.5),
        ({"beta_factors": 0.6, "momentum": 0.8}, (1 - 0.8**t) / 0.2),
        ({"beta_factors": 0.6, "momentum": 0.8, "nesterov": True}, 1 + 0.8 * (1 - 0.8**t) / 0.2),
    ):
        found = updates(run, [(U * s) @ Vt] * 7, **{**PLAIN, **options})
        same(found, np.multiply.outer(size, U @ Vt))


@both
def test_roots_are_those_of_the_last_refresh(run):
    """With plain sums of one gradient the update is ``tau^{-1/2}`` of the polar factor, tau the step of the refresh."""
    U, s, Vt = svd()
    G = (U * s) @ Vt
    for options, tau in (
        ({"update_freq": 1}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({**OLD, "update_freq": 3}, [1, 1, 1, 4, 4, 4, 7, 7]),
        ({**OLD, "update_freq": 10}, [1] * 8),
        ({**OLD, "update_freq": 3, "start_step": 2}, [0, 0, 3, 3, 3, 6, 6, 6]),
        ({**OLD, "update_freq": 10, "start_step": 5}, [0, 0, 0, 0, 0, 6, 6, 6]),
        # every step while fewer than 8 gradients have been seen, every second until the 16th, every fourth until the 32nd
        ({"update_freq": 2}, [1, 2, 3, 4, 5, 6, 7, 7, 9, 9]),
        ({"update_freq": 3}, [1, 2, 3, 4, 5, 6, 7, 7, 9, 9, 11, 11, 13, 13, 13, 16]),
        (
            {"update_freq": 10},
            [1, 2, 3, 4, 5, 6, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15, 17, 17, 17, 17, 21, 21, 21, 21, 25],
        ),
        ({"update_freq": 10, "start_step": 5}, [0, 0, 0, 0, 0, 6, 7, 8, 8, 10]),
    ):
        found = updates(run, [G] * len(tau), **{**PLAIN, **options})
        same(found, np.array([i**-0.5 * (U @ Vt) if i else G for i in tau]))


@both
@pytest.mark.parametrize("stacking", STACKINGS)
def test_staggered_blocks_take_turns(stacking, run):
    """Blocks 0 and 1 of one parameter and 2 of another group; the vector between them is not counted."""
    U, s, Vt = svd()
    G = np.concatenate([(U * s) @ Vt, 2 * (U * s) @ Vt])
    zeros = [{"params": [np.zeros((12, 6)), np.zeros(6)]}, {"params": [np.zeros((6, 6))], "start_step": 1}]
    options = {
        **PLAIN,
        "update_freq": 3,
        **OLD,
        "refresh": "staggered",
        "block_size": 6,
        "lr": 1.0,
        "stacking": stacking,
    }
    values = run(zeros, [[G, np.ones(6), G[:6]]] * 8, **options)
    steps = [
        -np.diff([v[i] for v in values], axis=0, prepend=np.zeros_like(values[0][i])[None]) for i in (0, 2)
    ]
    found = [steps[0][:, :6], steps[0][:, 6:], steps[1]]
    for step, tau in zip(
        found, ([1, 1, 1, 4, 4, 4, 7, 7], [1, 1, 3, 3, 3, 6, 6, 6], [0, 2, 3, 3, 3, 6, 6, 6]), strict=True
    ):
        same(step, np.array([i**-0.5 * (U @ Vt) if i else G[:6] for i in tau]))


@both
@pytest.mark.parametrize("stacking", STACKINGS)
def test_young_staggered_blocks_take_turns_of_growing_length(stacking, run):
    """All in every step until the 8th gradient, then those of even and of odd number in turn, from the 16th on one in four.

    Block j is due at step t when t - 1 + j is divisible by 1, 2, 4: block 0 at 7, 9, ..., 15, 17, 21; block 1 at 7, 8, 10, ..., 14, 16, 20.
    """
    U, s, Vt = svd()
    G = np.concatenate([(U * s) @ Vt] * 4, axis=1)
    options = {**PLAIN, "update_freq": 10, "refresh": "staggered", "block_size": 6, "stacking": stacking}
    found = updates(run, [G] * 22, **options)
    odd = [1, 2, 3, 4, 5, 6, 7, 7, 9, 9, 11, 11, 13, 13, 15]
    even = [1, 2, 3, 4, 5, 6, 7, 8, 8, 10, 10, 12, 12, 14, 14]
    turns = (
        [*odd, 15, 17, 17, 17, 17, 21, 21],
        [*even, 16, 16, 16, 16, 20, 20, 20],
        [*odd, 15, 15, 15, 19, 19, 19, 19],
        [*even, 14, 14, 18, 18, 18, 18, 22],
    )
    for j, tau in enumerate(turns):
        same(found[:, :, 6 * j : 6 * j + 6], np.array([i**-0.5 * (U @ Vt) for i in tau]))


@both
def test_zero_gradient_has_the_identity_for_a_root_unless_it_is_damped(run):
    """Refreshed at steps 1 and 4: raw gradients in between, then the sum of three equal terms."""
    U, s, Vt = svd()
    G = (U * s) @ Vt
    found = updates(run, [0 * G, G, G, G], **{**PLAIN, **OLD, "update_freq": 3})
    same(found, np.array([0 * G, G, G, 3**-0.5 * (U @ Vt)]))
    found = updates(run, [0 * G, G], **{**PLAIN, **OLD, "update_freq": 3, "damping": 0.1})
    same(found, np.array([0 * G, 0.1**-0.5 * G]))  # what is damped has a root: 0.1^{-1/4} on either side
    # while factors are young the next step refreshes again: sums of one, two, three terms
    found = updates(run, [0 * G, G, G, G], **{**PLAIN, "update_freq": 3})
    same(found, np.array([0 * G, U @ Vt, 2**-0.5 * (U @ Vt), 3**-0.5 * (U @ Vt)]))


@both
@pytest.mark.parametrize("grafting", ["sgd", "adagrad", "rmsprop", "adam", Graft("adam", 0.7, 0.1)])
@pytest.mark.parametrize("scope", ["block", "layer"])
def test_update_has_the_norm_of_the_graft_direction_and_its_own_direction(scope, grafting, run):
    gradients = [each[0] for each in problem([(11, 13)])[1]]
    options = {"block_size": 8, "update_freq": 3, "grafting_scope": scope}
    U = updates(run, gradients, grafting=grafting, **options)
    D = updates(run, gradients, grafting=grafting, start_step=NEVER, **options)
    bare = updates(run, gradients, grafting=None, **options)
    corners = (
        [np.s_[a, b] for a in np.s_[:8, 8:] for b in np.s_[:8, 8:]] if scope == "block" else [np.s_[:, :]]
    )
    for t in (0, 1, 49):
        for part in corners:
            size = np.linalg.norm(D[t][part]) / np.linalg.norm(bare[t][part])
            same(U[t][part], size * bare[t][part], 1e-9)
            assert np.linalg.norm(U[t][part] - D[t][part]) > 0.1 * np.linalg.norm(D[t][part])


@both
@pytest.mark.parametrize("grafting", [None, "sgd"])
def test_rotated_gradients_give_rotated_steps(grafting, run):
    """``Q U P^T`` for ``Q G P^T``: nothing acts on single entries. (A norm of row sums does, so the damping is absolute.)"""
    Q, P = orthogonal(5, 1).numpy(), orthogonal(7, 2).numpy()
    gradients = [each[0] for each in problem([(5, 7)], steps=8)[1]]
    options = {
        "grafting": grafting,
        **OLD,
        "update_freq": 3,
        "damping": 0.1,
        "rel_damping": 0.0,
        "momentum": 0.9,
    }
    expected = Q @ updates(run, gradients, **options) @ P.T
    same(updates(run, [Q @ G @ P.T for G in gradients], **options), expected, 1e-11)


@both
@pytest.mark.parametrize("grafting", [None, "adam"])
@pytest.mark.parametrize("block_size", [4, np.inf])
def test_permuted_gradients_give_permuted_steps(block_size, grafting, run):
    """Rows and columns, within blocks and whole blocks; transposed matrices too."""
    gradients = [each[0] for each in problem([(8, 12)], steps=8)[1]]
    rows = np.array([5, 4, 7, 6, 1, 3, 0, 2])
    columns = np.array([8, 9, 11, 10, 0, 2, 1, 3, 7, 6, 5, 4])
    options = {"block_size": block_size, "grafting": grafting, **OLD, "update_freq": 3}
    expected = updates(run, gradients, **options)
    moved = updates(run, [G[rows][:, columns] for G in gradients], **options)
    same(moved, expected[:, rows][:, :, columns], 1e-9)
    same(updates(run, [G.T for G in gradients], **options), expected.swapaxes(1, 2), 1e-9)


@both
@pytest.mark.parametrize("stacking", STACKINGS)
def test_order_of_the_parameters_does_not_matter(stacking, run):
    starts, gradients = problem(ALL_SHAPES, "missing", steps=8)
    order = np.random.default_rng(0).permutation(len(starts))
    options = {"lr": 0.01, "block_size": 4, **OLD, "update_freq": 3, "stacking": stacking}
    expected = run([{"params": starts}], gradients, **options)[-1]
    found = run(
        [{"params": [starts[i] for i in order]}], [[each[i] for i in order] for each in gradients], **options
    )[-1]
    for i, W in zip(order, found, strict=True):
        np.testing.assert_allclose(W, expected[i], rtol=1e-11, atol=1e-12)


OPTIONS = {**OLD, "block_size": 4, "update_freq": 3, "start_step": 2, "momentum": 0.9, "one_d": "dash"}


@both
@pytest.mark.parametrize("shape", [(6, 5), (7,), (4, 2, 3), ()])
def test_maximize_is_the_negated_gradient(shape, run):
    (W,), gradients = problem([shape], steps=8)
    ascent = trajectory(run, W, [each[0] for each in gradients], maximize=True, weight_decay=0.1, **OPTIONS)
    same(ascent, trajectory(run, W, [-each[0] for each in gradients], weight_decay=0.1, **OPTIONS))


@both
@pytest.mark.parametrize("shape", [(6, 5), (7,), (4, 2, 3), ()])
def test_steps_are_linear_in_the_learning_rate(shape, run):
    gradients = [each[0] for each in problem([shape], steps=8)[1]]
    expected = updates(run, gradients, **OPTIONS)
    same(updates(run, gradients, lr=0.25, **OPTIONS), 0.25 * expected)
    assert not updates(run, gradients, lr=0.0, **OPTIONS).any()


@both
@pytest.mark.parametrize("shape", [(6, 5), (7,), (4, 2, 3), ()])
def test_steps_without_a_gradient_are_no_steps(shape, run):
    """Neither decay nor count: what remains is the run with these steps left out."""
    (W,), gradients = problem([shape], steps=8)
    held = [each[0] for each in gradients]
    present = np.array([0, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 0, 1], dtype=bool)
    rest = iter(held)
    options = {"weight_decay": 0.1, **OPTIONS}
    found = trajectory(run, W, [next(rest) if there else None for there in present], **options)
    expected = np.concatenate([W[None], trajectory(run, W, held, **options)])
    np.testing.assert_array_equal(found, expected[np.cumsum(present)])


@both
@pytest.mark.parametrize("shape", [(6, 5), (7,), (4, 2, 3), (), (0, 4)])
@pytest.mark.parametrize("grafting", [None, "sgd", "adagrad", "rmsprop", "adam"])
def test_zero_gradients_leave_weight_decay(grafting, shape, run):
    W = np.random.default_rng(0).standard_normal(shape) * np.ones(shape)
    found = trajectory(run, W, [np.zeros(shape)] * 5, lr=0.1, weight_decay=0.5, **OPTIONS, grafting=grafting)
    np.testing.assert_allclose(found, [W * 0.95**t for t in range(1, 6)], rtol=1e-14)


@both
@pytest.mark.parametrize("shape", [(6, 5), (7,)])
def test_weight_decay_comes_before_the_update_and_stays_out_of_the_momentum(shape, run):
    """``W_t = W_{t-1} (1 - lr weight_decay) - lr u_t`` with the u_t of the run without decay."""
    (W,), gradients = problem([shape], steps=8)
    held = [each[0] for each in gradients]
    found = trajectory(run, W, held, lr=0.1, weight_decay=0.5, **OPTIONS)
    for V, u in zip(found, updates(run, held, lr=0.1, **OPTIONS), strict=True):
        W = W * 0.95 - u
        same(V, W)
