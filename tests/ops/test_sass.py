"""What the compile gate finds in a listing of machine code."""

from tests.ops.sass import overwritten_operands
from tests.ops.sass_descriptors import unsteady_descriptors

LISTING = """
.L_x_1:
        /*0010*/                   LOP3.LUT R8, R20, UR6, RZ, 0xfc, !PT ;
        /*0020*/                   LOP3.LUT R9, R21, UR6, RZ, 0xfc, !PT ;
        /*0030*/                   F2FP.BF16.F32.PACK_AB R10, R3, R2 ;
        /*0040*/                   MOV R11, R22 ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R56, R8, gdesc[UR20], RZ, !UPT, gsb0 ;
        /*0060*/                   FADD R30, R31, R32 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   FADD R9, R56, R57 ;
        /*0090*/              @!P0 BRA `(.L_x_1) ;
"""


def test_overwritten_operands_are_found_in_a_listing():
    assert overwritten_operands(LISTING) == []
    invariant = LISTING.replace("LOP3.LUT R9, R21, UR6, RZ, 0xfc, !PT", "NOP")  # R9 would have to survive the turn
    assert "A register R9 of instruction 4 comes from FADD" in overwritten_operands(invariant)[0]
    early = LISTING.replace("FADD R30,", "FADD R10,")
    assert "R10 is written by FADD (5) while an HGMMA reads it" in overwritten_operands(early)[0]
    loaded = LISTING.replace("MOV R11, R22", "LDG.E.64 R10, desc[UR60][R12.64]")
    assert "comes from LDG" in overwritten_operands(loaded)[0]
    spilled = LISTING.replace("MOV R11, R22", "LDL.LU R11, [R1+0x4]")
    assert overwritten_operands(spilled) == []


BRANCHES = """
        /*0010*/                   F2FP.BF16.F32.PACK_AB R8, R3, R2 ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/                   FADD R8, R3, R2 ;
        /*0040*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R56, R8, gdesc[UR20], RZ, !UPT, gsb0 ;
        /*0060*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
.L_x_2:
        /*0070*/                   EXIT ;
"""


def test_overwritten_operands_are_found_on_every_way_to_a_product():
    assert overwritten_operands(BRANCHES) == []
    falls_through = BRANCHES.replace("BRA `(.L_x_2)", "NOP")
    assert overwritten_operands(falls_through) == ["A register R8 of instruction 4 comes from FADD"]
    predicated = BRANCHES.replace("        /*0010*/                   F2FP", "        /*0010*/              @!P1 F2FP")
    assert overwritten_operands("        /*0000*/                   FMUL R8, R3, R2 ;" + predicated) == [
        "A register R8 of instruction 5 comes from FMUL"
    ]


STALE = """
        /*0010*/                   UMOV UR6, 0x400 ;
        /*0020*/                   UMOV UR7, 0x40000040 ;
        /*0030*/               @P4 BRA `(.L_x_1) ;
        /*0040*/                   UMOV UR6, UR45 ;
.L_x_1:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
"""


def test_descriptors_that_depend_on_the_way_to_them_are_found_in_a_listing():
    wrong = unsteady_descriptors(STALE)
    assert wrong == ["descriptor UR6 of the HGMMA 4 may come from UMOV (0), UMOV (3)"]
    assert unsteady_descriptors(STALE.replace("@P4 BRA `(.L_x_1)", "NOP")) == []
    assert unsteady_descriptors(STALE.replace("UMOV UR6, UR45", "UMOV UR9, UR45")) == []
    in_registers = STALE.replace("R24, gdesc[UR4]", "R24, R8, gdesc[UR6]")  # reads UR8 and UR9 alone
    assert unsteady_descriptors(in_registers) == []
