"""Functions that are exercises and no part of a package: each asks what must happen, in a world of its own.

flat.py        parameters in one flat buffer                      07
zero2.py       a backward of ZeRO-2, on flat gradients            11
zero3.py       ZeRO-3 on a few layers: unshard, reshard           12, 13
hybrid.py      a step with a sharding factor, on flat numbers     14
nearest.py     the nearest number of a format                     19
lost.py        how small an update of a weight is lost            24
attention.py   the backward of attention, whole matrices          41
peak.py        the peak of a step, predicted                      42
bug_….py       training runs as they should be                    43 to 46, 49 to 55
"""
