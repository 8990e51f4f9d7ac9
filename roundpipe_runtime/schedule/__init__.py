"""Compute schedules, execution plans, layer costs and simulated times, without running a layer."""

from .partitioning import LayerCost, MeasuredCosts, analytic_cost, layer_costs, partition
from .plan import ModelExecutePlan
from .round_robin import RoundRobin, Stage, Step, clock_cycles, draw, steps_in_order
from .simulation import Machine, Simulation, StageLoad, TimedStep, makespan, simulate

__all__ = [
    "LayerCost", "Machine", "MeasuredCosts", "ModelExecutePlan", "RoundRobin", "Simulation", "Stage", "StageLoad",
    "Step", "TimedStep", "analytic_cost", "clock_cycles", "draw", "layer_costs", "makespan", "partition", "simulate",
    "steps_in_order",
]  # fmt: skip
