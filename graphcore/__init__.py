"""graphcore"""
