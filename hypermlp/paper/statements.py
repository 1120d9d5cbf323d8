"""The numbers and titles of the paper's statements, by the labels that its source gives them.

Statements of all kinds share one counter per section; the sections of the appendix have letters.
"""

from typing import NamedTuple


class Statement(NamedTuple):
    """A theorem, lemma or the like of the paper."""

    kind: str
    number: str
    title: str


STATEMENTS = {
    "thm:core_dynamic_head": Statement(
        "Theorem", "2.1", "Dynamic-head decomposition: MLP form and context-wide slots"
    ),
    "cor:warped_routing": Statement(
        "Corollary", "2.2", "Warped routing strictly generalizes polyhedral routing"
    ),
    "thm:core_lag_layout": Statement(
        "Theorem", "2.3", "Lag layout: extension consistency implies AR truncation invariance"
    ),
    "prop:core_hyperglu": Statement("Proposition", "2.4", "HyperGLU decouples routing and magnitude"),
    "thm:core_budget_asymmetry": Statement("Theorem", "2.5", "Budget asymmetry in residual two-layer blocks"),
    "prop:core_empirical_short": Statement(
        "Proposition", "2.6", "Dynamic-MLP view explains several empirical design principles"
    ),
    "lem:gate-invariance-reachable": Statement(
        "Lemma", "B.2", "Gate invariance under scalar L2 normalization"
    ),
    "lem:relu-diagonal-gating": Statement("Lemma", "C.1", "ReLU is diagonal gating"),
    "thm:fixed-2layer-relu-subnetwork": Statement(
        "Theorem", "C.2", "Fixed 2-layer ReLU MLP selects a sub-network"
    ),
    "prop:dynamic_two_layer_form": Statement("Proposition", "C.3", "Dynamic two-layer form"),
    "thm:three-stage-memory-multistage-pruning": Statement(
        "Theorem", "C.5", "Three-stage memory and multi-stage pruning"
    ),
    "lem:dplr-extension-consistency": Statement(
        "Lemma", "C.6", "DPLR temporal-mixing parameterization of R admits prefix-extension consistency"
    ),
    "cor:truncation-invariance": Statement(
        "Corollary", "C.7", "Extension consistency, monotone expressivity, and non-instantiated pool slots"
    ),
    "prop:ever-growing-width": Statement(
        "Proposition", "C.8", "Ever-growing hidden width and context-instantiated pool slots"
    ),
    "prop:infinite-dictionary": Statement(
        "Proposition", "C.9", "Implicit infinite reachable atom set across contexts"
    ),
    "thm:polyhedral": Statement("Theorem", "C.10", "Polyhedral spline under static mixing"),
    "rem:l2norm-breaks-cpwl": Statement(
        "Remark", "C.11", "Scalar L2 normalization preserves boundaries but generally breaks CPWL"
    ),
    "cor:R-static": Statement("Corollary", "C.12", "Diagonal vs. mixing effects of R1 (static)"),
    "thm:warped": Statement("Theorem", "C.13", "Pullback orthant partition and piecewise-smoothness"),
    "prop:differential": Statement("Proposition", "C.14", "Local linearization and deformation terms"),
    "rem:lowrank": Statement("Remark", "C.15", "Low-rank dynamic R yields controlled smooth deformations"),
    "lem:reachable-compact": Statement("Lemma", "D.2", "Reachable atoms lie in a compact set"),
    "lem:Psi-bounded-reachable": Statement(
        "Lemma", "D.3", "Measurability and boundedness of the feature map on X x Omega_t"
    ),
    "thm:bounded-linear-readout-reachable": Statement(
        "Theorem", "D.4", "Bounded linear readout over reachable measures"
    ),
    "thm:tv-contraction-reachable": Statement("Theorem", "D.6", "Restriction/activation is a TV contraction"),
    "thm:ntk-gradient-flow": Statement("Theorem", "D.9", "Exact prediction dynamics under gradient flow"),
    "lem:ntk-gate-stability-margin": Statement(
        "Lemma", "D.11", "Current-step Activated Memory stability under a margin"
    ),
    "prop:mech-measure-readout": Statement(
        "Proposition", "E.1", "Pointwise measure readout and current-step activation"
    ),
    "lem:mech-pushforward": Statement("Lemma", "E.2", "Pushforward form of pool instantiation"),
    "lem:mech-tv-contraction": Statement(
        "Lemma", "E.6", "Restriction (activation gating) is a TV contraction"
    ),
    "rem:mech-tv-atomic": Statement("Remark", "E.7", "Atomic measures: TV equals pool size"),
    "prop:mech-output-bound": Statement("Proposition", "E.8", "A priori output bound via TV mass"),
    "thm:offset-better": Statement(
        "Theorem", "F.1", "Offset (lag) layout aligns canonical extension with autoregressive truncation"
    ),
    "thm:lowrank_W2_invariant": Statement("Theorem", "F.3", "Output-subspace invariance under low-rank W2"),
    "cor:W2_invariant_functionals": Statement("Corollary", "F.4", "Invariant linear functionals"),
    "thm:lowrank_W1_quotient": Statement("Theorem", "F.5", "Quotient structure under low-rank W1"),
    "lem:app_cost_vec_dplr": Statement("Lemma", "G.1", "Vector-DPLR multiplication"),
    "prop:core_cost_short": Statement(
        "Proposition", "G.2", "DPLR temporal mixing keeps attention-style scaling complexity"
    ),
    "prop:app_cost_infer": Statement("Proposition", "G.3", "Inference time and overhead (one head)"),
    "prop:app_cost_train": Statement(
        "Proposition", "G.4", "Training-time overhead (teacher forcing, one head)"
    ),
    "rem:app_cost_fft": Statement("Remark", "G.5", "Prefix-lag contractions are causal convolutions"),
    "prop:imp1_additive_pool": Statement(
        "Proposition", "H.1", "Prompt inclusion is additive pool instantiation (no mixing)"
    ),
    "rem:imp1_infinite_doc": Statement(
        "Remark", "H.2", '"Infinite document truncation" as a contextualization of pool instantiation'
    ),
    "prop:imp2_slots_global": Statement(
        "Proposition", "H.3", "Slots are global (context-wide) linear combinations"
    ),
    "cor:imp3_monotone": Statement(
        "Corollary", "H.4", "Monotone realizable family in context length (lag layout)"
    ),
    "prop:imp3_registers_nomix": Statement(
        "Proposition", "H.5", "Registers enlarge the instantiated pool (no sequence mixing)"
    ),
    "rem:imp3_registers_mix": Statement("Remark", "H.6", "Registers under sequence mixing"),
    "prop:impC_static": Statement("Proposition", "H.7", "Static sequence mixing mixes hyperplane normals"),
    "prop:impC_dynamic": Statement(
        "Proposition", "H.8", "Dynamic sequence mixing yields warped (curved) boundaries"
    ),
    "rem:impC_lowrank": Statement("Remark", "H.9", "Low-rank dynamic R gives controlled warping"),
    "prop:impE_linear_no_prune": Statement(
        "Proposition", "H.10", "Ungated normalization yields a full-pool signed readout"
    ),
    "thm:app_strict_gap_summary": Statement("Proposition", "I.1", "Strict expressivity gap (summary)"),
    "prop:param_budget_efficiency": Statement(
        "Proposition",
        "I.2",
        "Paying for temporal mixing by shrinking QK yields a strict budgeted expressivity gain",
    ),
    "prop:app_spurious_activation": Statement(
        "Proposition", "I.3", "Token-wise spurious activation under symmetric noise"
    ),
    "sec:app:imp_lora_vo": Statement(
        "Section", "H.6", "LoRA: spend adaptation rank on the readout side (V/O)"
    ),
    "sec:app:imp_gated_vo": Statement(
        "Section",
        "H.7",
        "Gated attention: gates are most expressive on the readout side (between V and O)",
    ),
    "sec:app:examples": Statement("Section", "I.2", "Examples of additional functions realized by HyperMLP"),
}


def cite(where: str) -> str:
    """Return a citation such as "Theorem 2.3 (i): title" for "Theorem thm:label (i)"."""
    kind, label, *part = where.split(" ", 2)
    found = STATEMENTS[label]
    assert kind == found.kind, f"{label} is a {found.kind}"
    return f"{' '.join((kind, found.number, *part))}: {found.title}"
