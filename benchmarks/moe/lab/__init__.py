"""The parts of ../gpu_lab.py; see there. Nothing here runs on its own."""
