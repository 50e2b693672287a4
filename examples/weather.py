"""The classic first server: weather alerts and forecasts, here from recorded data, so that it needs no network.

Run it: `trimcp call examples/weather.py get_forecast latitude=40.7128 longitude=-74.006`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import trimcp

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("weather_data.json").read_text("utf-8"))
NEAR = 0.5  # degrees: how far from a recorded place its forecast still holds

server = trimcp.Server("weather", "1.0.0")


@server.tool(run="inline")
def get_alerts(state: Annotated[str, "Two-letter code of a US state, such as CA or NY"]) -> str:
    """Get the weather alerts for a US state."""
    alerts = RECORDED["alerts"].get(state.strip().upper())
    if alerts is None:
        raise trimcp.ToolError(f"no alerts are recorded for {state!r}; try one of {', '.join(RECORDED['alerts'])}")
    return "\n---\n".join(map(_describe_alert, alerts)) or f"No active alerts for {state.strip().upper()}."


@server.tool(run="inline")
def get_forecast(
    latitude: Annotated[float, "Latitude of the place, in degrees north"],
    longitude: Annotated[float, "Longitude of the place, in degrees east"],
) -> str:
    """Get the weather forecast for a place."""
    for place in RECORDED["places"]:
        if abs(place["latitude"] - latitude) <= NEAR and abs(place["longitude"] - longitude) <= NEAR:
            return "\n---\n".join(map(_describe_period, place["periods"]))
    places = ", ".join(f"{p['name']} ({p['latitude']}, {p['longitude']})" for p in RECORDED["places"])
    raise trimcp.ToolError(f"no forecast is recorded near {latitude}, {longitude}; try {places}")


def _describe_alert(alert: dict[str, str]) -> str:
    return "\n".join(
        [
            f"Event: {alert['event']}",
            f"Area: {alert['area']}",
            f"Severity: {alert['severity']}",
            f"Description: {alert['description']}",
            f"Instructions: {alert['instruction']}",
        ]
    )


def _describe_period(period: dict[str, Any]) -> str:
    return "\n".join(
        [
            f"{period['name']}:",
            f"Temperature: {period['temperature']}°F",
            f"Wind: {period['wind']}",
            f"Forecast: {period['text']}",
        ]
    )


if __name__ == "__main__":
    trimcp.run_stdio(server)
