"""What is put into the processes of a job from outside: sitecustomize.py is imported by Python
itself, for this folder stands on their PYTHONPATH."""
