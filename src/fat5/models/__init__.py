"""Hugging Face classes of FAT5, registered with the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from fat5.models.configuration import FAT5Config
from fat5.models.modeling import FAT5EncoderModel, FAT5ForConditionalGeneration, FAT5PreTrainedModel
from fat5.models.outputs import FAT5Seq2SeqOutput

AutoConfig.register("fat5", FAT5Config)
AutoModel.register(FAT5Config, FAT5EncoderModel)
AutoModelForSeq2SeqLM.register(FAT5Config, FAT5ForConditionalGeneration)

__all__ = [
    "FAT5Config",
    "FAT5EncoderModel",
    "FAT5ForConditionalGeneration",
    "FAT5PreTrainedModel",
    "FAT5Seq2SeqOutput",
]
