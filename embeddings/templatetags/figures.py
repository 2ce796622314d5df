"""Figures for people."""
from __future__ import annotations

from django import template

register = template.Library()


@register.filter
def thousands(value: int) -> str:
    return f"{value:,}"


@register.filter
def score(value: float) -> str:
    """Four decimals: what a cosine of f32 vectors can be trusted for, and enough to tell neighbours apart."""
    return f"{value:.4f}"


@register.filter
def short(value: float) -> str:
    return f"{value:.4g}"
