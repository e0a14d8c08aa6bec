"""Collects all text tables in one place; each document has a module with its table."""

from __future__ import annotations

from memo_sim.views.answer_text import answer_text, longest_text
from memo_sim.views.chart import chart_table
from memo_sim.views.comparison_table import comparison_table
from memo_sim.views.fit_table import fit_table
from memo_sim.views.gpus_table import gpus_table
from memo_sim.views.placement_table import placement_report
from memo_sim.views.plan_table import infeasible_table, peak_table, plans_table, ranked_table, stall_table
from memo_sim.views.published_table import published_table
from memo_sim.views.results_table import results_table
from memo_sim.views.text_table import text_table
from memo_sim.views.validation_report import validation_report
from memo_sim.views.validation_table import summary_table, validation_table

__all__ = [
    "answer_text",
    "chart_table",
    "comparison_table",
    "fit_table",
    "gpus_table",
    "infeasible_table",
    "longest_text",
    "peak_table",
    "placement_report",
    "plans_table",
    "published_table",
    "ranked_table",
    "results_table",
    "stall_table",
    "summary_table",
    "text_table",
    "validation_report",
    "validation_table",
]
