"""The parts of ../gpu_lab.py; nothing here runs on its own."""
