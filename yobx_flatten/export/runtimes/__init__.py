"""Write a program as a file for AOTInductor, ExecuTorch or OpenVINO, and compare the file with the eager module."""
