"""Hugging Face classes of FAT5, registered with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
)

from fat5.models.classification import FAT5ForSequenceClassification, FAT5ForTokenClassification
from fat5.models.configuration import FAT5Config
from fat5.models.embedding import FAT5ForTextEmbedding
from fat5.models.modeling import FAT5EncoderModel, FAT5ForConditionalGeneration, FAT5PreTrainedModel
from fat5.models.outputs import FAT5Seq2SeqOutput
from fat5.models.question_answering import FAT5ForQuestionAnswering

AutoConfig.register("fat5", FAT5Config)
AutoModel.register(FAT5Config, FAT5EncoderModel)
AutoModelForSeq2SeqLM.register(FAT5Config, FAT5ForConditionalGeneration)
AutoModelForSequenceClassification.register(FAT5Config, FAT5ForSequenceClassification)
AutoModelForTokenClassification.register(FAT5Config, FAT5ForTokenClassification)
AutoModelForQuestionAnswering.register(FAT5Config, FAT5ForQuestionAnswering)
AutoModelForTextEncoding.register(FAT5Config, FAT5EncoderModel)

__all__ = [
    "FAT5Config",
    "FAT5EncoderModel",
    "FAT5ForConditionalGeneration",
    "FAT5ForQuestionAnswering",
    "FAT5ForSequenceClassification",
    "FAT5ForTextEmbedding",
    "FAT5ForTokenClassification",
    "FAT5PreTrainedModel",
    "FAT5Seq2SeqOutput",
]
