import subprocess


def shell(command: str) -> str:
    """Run a line of shell"""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout
