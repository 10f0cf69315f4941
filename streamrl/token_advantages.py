"""Advantages of single tokens: GAE and V-trace with a critic, returns-to-go for REINFORCE++. No gradient anywhere.

A response is an episode whose actions are its tokens. The state of a token is everything before it, and `values` has
the critic's value of that state at the token's own place. The state after the last token is worth 0, also when the
response was cut at the length limit: the reward was given to the response as it is, and nothing comes after it. verl
and TRL do the same.

Every estimator is one linear recurrence from the last token to the first, x_t = delta_t + decay_t x_{t+1}. It runs
over the positions of the longest response, for all responses at once. Numbers are float64 inside, as in advantages.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.correction import bounded_exp


class ResponseRows:
    """The response tokens of packed sequences as rows [N, L], one response a row, 0 behind its last token.

    Example: response_mask [0, 1, 1, 0, 1], sequence_index [0, 0, 0, 1, 1]: `rows` of [9, 1, 2, 9, 3] is [[1, 2],
    [3, 0]], and `tokens` of that is [0, 1, 2, 0, 3]. A sequence without a response token has no row.
    """

    def __init__(self, response_mask: Tensor, sequence_index: Tensor) -> None:
        """Of [T] and [T]; the tokens of a sequence stand together."""
        self._num_tokens = len(response_mask)
        self._places = response_mask.nonzero().squeeze(1)  # [K]
        _, row, lengths = torch.unique_consecutive(
            sequence_index[self._places], return_inverse=True, return_counts=True
        )
        column = torch.arange(len(row), device=row.device) - (lengths.cumsum(0) - lengths)[row]
        self._shape = (len(lengths), int(lengths.max()) if len(lengths) else 0)
        self._cells = row * self._shape[1] + column  # [K]
        self._is_last = column == lengths[row] - 1

    def rows(self, values: Tensor) -> Tensor:
        """[T] -> [N, L] float64."""
        flat = torch.zeros(self._shape[0] * self._shape[1], dtype=torch.float64, device=values.device)
        return flat.index_copy(0, self._cells, values[self._places].double()).view(self._shape)

    def tokens(self, rows: Tensor) -> Tensor:
        """[N, L] -> [T] float64, 0 outside the response mask."""
        flat = torch.zeros(self._num_tokens, dtype=torch.float64, device=rows.device)
        return flat.index_copy(0, self._places, rows.reshape(-1)[self._cells])

    def last(self, values: Tensor) -> Tensor:
        """[T] -> [T]: the values at the last token of each response, 0 elsewhere."""
        places = self._places[self._is_last]
        return torch.zeros_like(values).index_copy(0, places, values[places])


def returns_to_go(rewards: Tensor, responses: ResponseRows) -> Tensor:
    """The sum of the rewards of a token and of those behind it. With r at the last token and -beta KL_i at each, that
    is r - beta sum_{i >= t} KL_i, as REINFORCE++ has it (Hu et al. 2025, arXiv 2501.03262).

    Args:
        rewards: [T] of single tokens.
        responses: which tokens those are.

    Returns:
        [T] float64, 0 outside the response mask.
    """
    rows = responses.rows(rewards)
    return responses.tokens(_recur(rows, torch.ones_like(rows)))


def gae(rewards: Tensor, values: Tensor, responses: ResponseRows, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al. 2016, arXiv 1506.02438, section 3).

    A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t; the critic's target is A_t + V_t.

    Args:
        rewards: [T] of single tokens.
        values: [T] of the states before the tokens.
        responses: which tokens those are.
        gamma: discount.
        lam: 0 trusts the critic, 1 the rewards.

    Returns:
        Advantages and targets, [T] float64, 0 outside the response mask.
    """
    r, v = responses.rows(rewards), responses.rows(values)
    advantages = _recur(r + gamma * _next(v) - v, torch.full_like(v, gamma * lam))
    return responses.tokens(advantages), responses.tokens(advantages + v)


def vtrace(
    rewards: Tensor,
    values: Tensor,
    log_ratios: Tensor,
    responses: ResponseRows,
    *,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
) -> tuple[Tensor, Tensor]:
    """V-trace: what the policy that is trained would earn, from tokens of another (Espeholt et al. 2018, arXiv
    1802.01561, section 4.1 and 4.2, eq. 1; lam from its remark 2).

    v_t = V_t + delta_t + gamma c_t (v_{t+1} - V_{t+1}), delta_t = rho_t (r_t + gamma V_{t+1} - V_t), rho_t =
    min(rho_bar, pi / mu), c_t = lam min(c_bar, pi / mu). The advantage is r_t + gamma v_{t+1} - V_t, *without* the
    factor rho_t of the policy gradient: that is the weight in the loss, and would count twice.

    Args:
        rewards: [T] of single tokens.
        values: [T] of the states before the tokens.
        log_ratios: [T] p - mu.
        responses: which tokens those are.
        gamma: discount.
        lam: 1 is the paper's V-trace.
        rho_bar: bound of the weight of a token's own error; decides which policy's value is learned.
        c_bar: bound of the weights through which later errors reach a token; decides how fast.

    Returns:
        Advantages, and the critic's targets v_t, [T] float64, 0 outside the response mask.
    """
    r, v = responses.rows(rewards), responses.rows(values)
    ratio = bounded_exp(responses.rows(log_ratios))
    deltas = ratio.clamp(max=rho_bar) * (r + gamma * _next(v) - v)
    targets = v + _recur(deltas, gamma * lam * ratio.clamp(max=c_bar))
    return responses.tokens(r + gamma * _next(targets) - v), responses.tokens(targets)


def _next(rows: Tensor) -> Tensor:
    """[N, L]: x_{t+1} at t, and 0 after the end."""
    return torch.cat([rows[:, 1:], torch.zeros_like(rows[:, :1])], dim=1)


def _recur(deltas: Tensor, decays: Tensor) -> Tensor:
    """[N, L], [N, L] -> [N, L]: x_t = delta_t + decay_t x_{t+1}; behind a response deltas must be 0."""
    sums = torch.empty_like(deltas)
    running = torch.zeros_like(deltas[:, 0]) if deltas.shape[1] else deltas.sum(1)
    for t in reversed(range(deltas.shape[1])):
        running = deltas[:, t] + decays[:, t] * running
        sums[:, t] = running
    return sums
